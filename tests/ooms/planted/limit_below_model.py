from oom_loop import allow
from torch import nn

allow(20)
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])  # cause: model
