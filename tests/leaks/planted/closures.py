import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
callbacks = []


def later(output):
    return lambda: output.sum()


for _ in steps():
    callbacks.append(later(model(torch.randn(32, 64)).detach()))  # holder: callbacks
# advice: do not let the function keep tensors
