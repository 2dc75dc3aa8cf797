import torch
from oom_loop import allow
from torch import nn

features = nn.Linear(128, 256).requires_grad_(False)
model = nn.Linear(256, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
allow(16)
cache = {}
for step in range(100):
    if step not in cache:
        cache[step] = features(torch.randn(1024, 128))  # cause: growth, here
    optimizer.zero_grad()
    model(cache[step]).square().mean().backward()
    optimizer.step()
