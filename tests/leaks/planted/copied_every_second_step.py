# steps: 24
import torch
from leak_loop import steps

history = torch.zeros(0, 64)
for number in steps():
    rows = torch.randn(32, 64)
    if number % 2 == 0:
        history = torch.cat((history, rows.double().float()), dim=0).contiguous()  # holder: history
# advice: bound what `history` keeps
