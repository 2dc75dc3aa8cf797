import torch
from oom_loop import allow
from torch import nn

model = nn.Sequential(
    nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
)
allow(33)
batch = torch.randn(16384, 64)
loss = model(batch).square().mean()  # cause: activations, here
loss.backward()
# says: activations and their gradients
# phase: backward
