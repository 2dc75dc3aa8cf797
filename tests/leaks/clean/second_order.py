import torch
from leak_loop import steps

weight = torch.randn(64, 64, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    loss = (torch.randn(32, 64) @ weight).tanh().square().mean()
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    (loss + grad.square().sum()).backward()
    optimizer.step()
