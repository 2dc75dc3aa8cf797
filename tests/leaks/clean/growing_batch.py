import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in steps():
    optimizer.zero_grad()
    model(torch.randn(32 * (number + 1), 64)).square().mean().backward()
    optimizer.step()
