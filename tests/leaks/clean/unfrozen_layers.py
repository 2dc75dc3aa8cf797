import torch
from leak_loop import steps

model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(12)))
model.requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
for number in steps():
    if number < len(model):
        model[-1 - number].requires_grad_(True)
    optimizer.zero_grad()
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
