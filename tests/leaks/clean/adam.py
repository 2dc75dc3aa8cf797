import torch
from leak_loop import steps

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
total = 0.0
for _ in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    total += loss.item()
