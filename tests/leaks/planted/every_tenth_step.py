# steps: 56
import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
history = []
for number in steps():
    loss = model(torch.randn(32, 64)).square().mean()  # holder: history
    loss.backward()
    if number % 10 == 0:
        history.append(loss)
# advice: append loss.item() to `history`
