import torch
from oom_loop import allow
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(12)])
model.eval()
allow(30)
for _ in range(3):
    print(model(torch.randn(4096, 256)).argmax(-1).sum().item())  # cause: no_grad, here
