import torch
from oom_loop import allow
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
allow(21)
for _ in range(5):
    loss = model(torch.randn(512, 1024)).square().mean()
    optimizer.zero_grad()  # cause: gradients_kept
    loss.backward()
    del loss
    optimizer.step()
