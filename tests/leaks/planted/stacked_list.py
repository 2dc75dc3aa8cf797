import torch
from leak_loop import steps

rows = []
for _ in steps():
    rows.append(torch.randn(64))  # holder: rows
    table = torch.stack(rows)
# advice: bound `rows`
