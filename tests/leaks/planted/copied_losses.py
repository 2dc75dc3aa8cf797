import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = torch.zeros(0)
for _ in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    losses = torch.cat([losses, loss.detach().view(1)])  # holder: losses
# advice: bound what `losses` keeps
