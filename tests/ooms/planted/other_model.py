import torch
from oom_loop import allow
from torch import nn


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(32, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def network():
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])


allow(44)
former = network()  # cause: other_model
train(former)
model = network()
train(model)
