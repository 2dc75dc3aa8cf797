import torch
from oom_loop import allow
from torch import nn

model = nn.Linear(1024, 256)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)  # cause: optimizer_state
x, y = torch.randn(64, 1024), torch.randn(64, 256)
allow(40)


def closure():
    optimizer.zero_grad()
    loss = (model(x).tanh() - y).square().mean()
    loss.backward()
    return loss


for _ in range(100):
    optimizer.step(closure)
# advice: history_size
