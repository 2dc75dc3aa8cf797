import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
for _ in steps():
    scale = torch.rand(10, 64)  # holder: _backward_hooks
    model.weight.register_hook(lambda grad, scale=scale: grad * scale)
    model(torch.randn(32, 64)).sum().backward()
# advice: remove the hook (handle.remove())
