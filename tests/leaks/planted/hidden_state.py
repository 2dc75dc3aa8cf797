import torch
from leak_loop import steps

cell = torch.nn.GRUCell(32, 64)
hidden = torch.zeros(8, 64)
for _ in steps():
    hidden = cell(torch.randn(8, 32), hidden)  # holder: hidden
# advice: cut the graph between steps: hidden = hidden.detach()
# advice: run it under torch.no_grad()
