import torch
from oom_loop import allow
from torch import nn

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
allow(28)
model(torch.randn(4, 1024)).square().mean().backward()
optimizer.step()  # cause: optimizer_state
