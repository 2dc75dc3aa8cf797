import torch
from oom_loop import allow
from torch import nn

allow(64)
images = torch.randn(45 << 18)  # cause: data, here
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)])
optimizer = torch.optim.Adam(model.parameters())
model(images[: 64 * 1024].view(64, 1024)).square().mean().backward()
optimizer.step()
# advice: load a batch at a time
