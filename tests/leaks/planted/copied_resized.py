import torch
from leak_loop import steps

column = torch.zeros(0)
for _ in steps():
    length = len(column)
    column.resize_(length + 64)[length:] = 1  # holder: column
# advice: bound what `column` keeps
