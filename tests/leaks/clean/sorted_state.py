import torch
from leak_loop import steps

cell = torch.nn.GRU(16, 32, batch_first=True)
state = torch.zeros(1, 4, 32)
average = torch.zeros(1, 4, 32)
last = torch.zeros(4, 1, 32)
for number in steps():
    with torch.no_grad():
        out, state = cell(torch.randn(4, 8 * (number + 1), 16), state)
        average = 0.9 * average + 0.1 * state
        like = torch.zeros_like(last)
        last = out - last.mean()
        last = last + last[:, -1:]
