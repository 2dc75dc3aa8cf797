import torch
from leak_loop import steps

weight = torch.randn(64, 64, requires_grad=True)
for _ in steps():
    loss = (torch.randn(32, 64) @ weight).tanh().square().mean()
    loss.backward(create_graph=True)  # holder: weight.grad
# advice: call backward() without create_graph=True
