# steps: 45
import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
total = torch.zeros(())
for number in steps():
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    if number % 5 == 0:
        total = total + loss  # holder: total
# advice: use total += loss.item()
