# steps: 40
# fills: masks
import torch
from leak_loop import steps

masks = {}
for number in steps():
    length = 64 + number % 20
    if length not in masks:
        masks[length] = torch.ones(length, length).tril()
    masks[length].sum()
