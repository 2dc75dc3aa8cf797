import torch
from oom_loop import allow
from torch import nn

model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
allow(20)
for rows in (64, 80, 64, 96, 72, 6000, 64):
    optimizer.zero_grad()
    model(torch.randn(rows, 256)).square().mean().backward()  # cause: large_batch
    optimizer.step()
