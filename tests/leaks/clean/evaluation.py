import torch
from leak_loop import steps

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
total = torch.zeros(())
for _ in steps():
    with torch.no_grad():
        total = total + model(torch.randn(32, 64)).square().mean()
