# fills: snapshots
# steps: 60
import torch
from leak_loop import steps

snapshots = []
for number in steps():
    value = torch.randn(64, 64)
    if number % 5 == 0:
        snapshots.append(value)
        snapshots = snapshots[-6:]
