import torch
from leak_loop import steps

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
for _ in steps():
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
