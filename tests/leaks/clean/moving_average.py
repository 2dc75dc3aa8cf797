import copy

import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.lerp_(new.detach(), 0.1)
