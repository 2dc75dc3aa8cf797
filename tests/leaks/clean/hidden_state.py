import torch
from leak_loop import steps

cell = torch.nn.GRUCell(32, 64)
optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
hidden = torch.zeros(8, 64)
for _ in steps():
    optimizer.zero_grad()
    hidden = cell(torch.randn(8, 32), hidden.detach())
    hidden.square().mean().backward()
    optimizer.step()
