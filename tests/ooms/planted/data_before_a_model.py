import torch
from oom_loop import allow
from torch import nn

allow(64)
images = torch.randn(55 << 18)  # cause: data, here
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)])
# advice: load a batch at a time
