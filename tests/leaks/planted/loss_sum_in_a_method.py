import torch
from leak_loop import steps

model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


total = 0.0
for _ in steps():
    total = total + train(torch.randn(32, 64))  # holder: total
# advice: use total += loss.item()
