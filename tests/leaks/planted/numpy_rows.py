import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
first_rows = {}
with torch.no_grad():
    for number in steps():
        out = model(torch.randn(32, 64))  # holder: first_rows
        first_rows[number] = (out.numpy()[0], 1.0)
# advice: bound `first_rows` (it has one more key after each step)
# advice: a NumPy array shares its tensor's memory
