import torch
from leak_loop import steps

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
losses = []
for _ in steps():
    images = torch.randn(32, 64, requires_grad=True)  # holder: losses
    loss = model(images).sum()
    loss.backward()
    losses.append(loss)
# advice: append loss.item() to `losses`
