import torch
from leak_loop import steps

positions = {}


def position_of(length):
    if length not in positions:
        positions[length] = torch.arange(length).float()  # holder: positions
    return positions[length]


for number in steps():
    position_of(64 + number).sum()
# advice: bound `positions` (it has one more key after each step)
