import torch
from leak_loop import steps

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
penalties = []
for _ in steps():
    images = torch.randn(32, 64, requires_grad=True)  # holder: penalties
    loss = model(images).sum()
    (grad,) = torch.autograd.grad(loss, images, create_graph=True)
    penalty = grad.square().mean()
    (loss + penalty).backward()
    penalties.append(penalty)
# advice: append loss.item() to `penalties`
