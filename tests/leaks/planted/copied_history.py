import torch
from leak_loop import steps

history = torch.zeros(0, 64)
for _ in steps():
    history = torch.cat([history, torch.randn(32, 64)])  # holder: history
# advice: bound what `history` keeps
