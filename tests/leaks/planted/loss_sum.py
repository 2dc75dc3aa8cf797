import torch
from leak_loop import steps

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
total = torch.zeros(())
for _ in steps():
    loss = model(torch.randn(32, 64)).square().mean()
    total = total + loss  # holder: total
# advice: use total += loss.item()
# advice: run it under torch.no_grad()
