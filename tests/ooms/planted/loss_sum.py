import torch
from oom_loop import allow
from torch import nn

model = nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
allow(24)
validation = 0.0
for _ in range(100):
    model(torch.randn(64, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    validation = validation + model(torch.randn(512, 128)).square().mean()  # cause: growth, here
