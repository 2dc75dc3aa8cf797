import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
history = []
for _ in steps():
    history.append(model(torch.randn(32, 64)))
    history = history[-3:]
