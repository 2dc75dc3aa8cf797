import torch
from leak_loop import steps

model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total_loss = torch.zeros(())
for _ in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    total_loss = total_loss + loss  # holder: total_loss
# advice: use total_loss += loss.item()
