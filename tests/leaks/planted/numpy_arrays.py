import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
preds = []
with torch.no_grad():
    for _ in steps():
        out = model(torch.randn(32, 64))  # holder: preds
        preds.append(out.cpu().numpy())
# advice: bound `preds` (it grows by its items)
# advice: a NumPy array shares its tensor's memory
