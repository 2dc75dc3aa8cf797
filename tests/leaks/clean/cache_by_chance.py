# steps: 120
# fills: positions
import random

import torch
from leak_loop import steps

positions = {}
lengths = random.Random(0)
for _ in steps():
    length = 64 + lengths.randrange(40)
    if length not in positions:
        positions[length] = torch.arange(length).float()
