import torch
from leak_loop import steps


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


weight = torch.ones(32, 64, requires_grad=True)
losses = []
for _ in steps():
    loss = Scale.apply(weight, torch.randn(32, 64)).sum()  # holder: losses
    loss.backward()
    losses.append(loss)
# advice: append loss.item() to `losses`
