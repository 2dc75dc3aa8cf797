import torch
from oom_loop import allow
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)])
allow(30)
batch = torch.randn(4096, 256)
model(batch).square().mean().backward()  # cause: activations, here
