import torch
from leak_loop import steps

model = torch.nn.Linear(64, 1)
optimizer = torch.optim.Adam(model.parameters())
history = []
for _ in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()  # holder: history
    loss.backward()
    optimizer.step()
    history.append(loss)
# advice: keep numbers: append loss.item() to `history`
