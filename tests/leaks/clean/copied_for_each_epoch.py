# steps: 40
import torch
from leak_loop import steps

for number in steps():
    if number % 5 == 0:
        predictions = torch.zeros(0, 64)
    predictions = torch.cat([predictions, torch.randn(32, 64)])
