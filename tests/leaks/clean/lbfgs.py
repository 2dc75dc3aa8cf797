import torch
from leak_loop import steps

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)
x, y = torch.randn(64, 8), torch.randn(64, 1)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for _ in steps():
    optimizer.step(closure)
