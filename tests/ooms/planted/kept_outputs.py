import torch
from oom_loop import allow
from torch import nn

model = nn.Linear(128, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
allow(16)
outputs = []
for _ in range(100):
    optimizer.zero_grad()
    output = model(torch.randn(1024, 128)).tanh()  # cause: growth, here
    output.square().mean().backward()
    optimizer.step()
    outputs.append(output.detach())
