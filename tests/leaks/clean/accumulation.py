import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters())
for number in steps():
    model(torch.randn(32, 64)).square().mean().backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
