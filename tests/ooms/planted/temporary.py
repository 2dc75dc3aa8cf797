import torch
from oom_loop import allow
from torch import nn

model = nn.Linear(256, 64)
allow(40)
points = model(torch.randn(512, 256))
distances = (points[:, None] - points[None]).square().sum(-1)  # cause: temporary, here
distances.mean().backward()
