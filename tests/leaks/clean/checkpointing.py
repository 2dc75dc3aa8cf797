import torch
from leak_loop import steps
from torch.utils.checkpoint import checkpoint

first = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
last = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    hidden = checkpoint(first, torch.randn(32, 64), use_reentrant=False)
    last(hidden).square().mean().backward()
    optimizer.step()
