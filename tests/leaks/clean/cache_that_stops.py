import torch
from leak_loop import steps

positions = {}
for number in steps():
    length = 64 + number % 4
    if length not in positions:
        positions[length] = torch.arange(length).float()
    positions[length].sum()
