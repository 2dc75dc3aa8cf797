import torch
from leak_loop import steps


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.twice = 2 * x
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.twice


model = torch.nn.Linear(64, 10)
for _ in steps():
    Square.apply(model(torch.randn(32, 64))).sum().backward()
