import collections

import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
pending = collections.deque()
for _ in steps():
    pending.append(model(torch.randn(32, 64)))  # holder: pending
    pending.appendleft(pending.pop())
# advice: put tensor.detach() into `pending`
# advice: run it under torch.no_grad()
