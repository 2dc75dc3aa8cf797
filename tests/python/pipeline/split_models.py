"""Stages whose backward is split: each a function that makes parameters, inputs and outputs anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint


@dataclass
class Stage:
    """`forward` gets the inputs and returns a tensor or several."""

    module: nn.Module
    inputs: list[torch.Tensor]
    forward: Callable[..., torch.Tensor | Sequence[torch.Tensor | None]] | None = None
    note: str = ""  # what the note says, where it is not empty
    split: bool = True
    frozen: bool = field(default=False)


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Twice(torch.autograd.Function):
    """A function of a person's own, of an input and a weight; counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * 2

    @staticmethod
    def backward(ctx, gradient):
        Twice.calls += 1
        x, w = ctx.saved_tensors
        return gradient * w * 2, (gradient * x * 2).sum(0)


class Scaled(nn.Module):
    """Multiplies by a parameter, through `function`."""

    def __init__(self, d: int, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))
        self.function = function

    def forward(self, *x):
        return self.function(*x, self.weight)


def sequential(*modules: nn.Module, rows: int = 5, width: int = 8) -> Stage:
    return Stage(nn.Sequential(*modules), [torch.randn(rows, width)])


def mlp() -> Stage:
    return sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def transformer() -> Stage:
    return Stage(nn.Sequential(Block(), Block()), [torch.randn(2, 6, 16)])


def attention_module() -> Stage:
    return Stage(
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True),
        [torch.randn(2, 6, 16)],
    )


def convolution() -> Stage:
    return Stage(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.GroupNorm(2, 6),
            nn.Conv2d(6, 4, 3, bias=False),
            nn.Flatten(),
            nn.Linear(36, 5),
        ),
        [torch.randn(2, 3, 10, 10)],
    )


def dropout() -> Stage:
    return sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2))


def recurrent() -> Stage:
    return Stage(
        nn.LSTM(8, 6, batch_first=True),
        [torch.randn(3, 5, 8)],
        lambda module, x: module(x)[0],
    )


def gated() -> Stage:
    return Stage(nn.GRU(8, 6, num_layers=2), [torch.randn(5, 3, 8)], lambda module, x: module(x)[0])


def shared_weight() -> Stage:
    module = nn.Linear(6, 6, bias=False)
    return Stage(module, [torch.randn(3, 6)], lambda m, x: m(m(x)))


def tied_four_times() -> Stage:
    module = nn.Linear(6, 6)
    return Stage(module, [torch.randn(3, 6)], lambda m, x: m(torch.tanh(m(torch.tanh(m(m(x)))))))


def several_outputs() -> Stage:
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)])
    return Stage(
        module,
        [torch.randn(3, 8)],
        lambda m, x: (m[1](m[0](x)), m[2](x), m[0].weight.sum(), x.argmax(1), x),
    )


def several_inputs() -> Stage:
    module = nn.Bilinear(4, 6, 3)
    inputs = [torch.randn(5, 4), torch.randn(5, 6), torch.tensor([1, 0, 2, 2, 1])]
    return Stage(module, inputs, lambda m, a, b, i: m(a, b)[i] + a[:, :1] * b[:, :3])


def input_twice() -> Stage:
    module = nn.Linear(4, 4)
    return Stage(module, [torch.randn(3, 4)], lambda m, x: m(x) * x + x.sin())


def frozen() -> Stage:
    stage = mlp()
    stage.module.requires_grad_(False)
    stage.frozen = True
    return stage


def half_frozen() -> Stage:
    stage = transformer()
    for name, parameter in stage.module.named_parameters():
        parameter.requires_grad_("qkv" in name or "norm2" in name)
    return stage


def embedding() -> Stage:
    module = nn.ModuleList([nn.Embedding(10, 8), nn.Linear(8, 8)])
    return Stage(
        module,
        [torch.randn(3, 8), torch.tensor([1, 4, 1])],
        lambda m, x, i: m[1](x + m[0](i)),
    )


def sparse_embedding() -> Stage:
    module = nn.ModuleList([nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8)])
    return Stage(
        module,
        [torch.randn(3, 8), torch.tensor([1, 4, 1])],
        lambda m, x, i: m[1](x) * m[0](i),
    )


def first_stage() -> Stage:
    module = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    return Stage(module, [torch.tensor([1, 4, 1])])


def views_in_place() -> Stage:
    def forward(module, x):
        y = module[0](x).view(3, 2, 4)
        y[:, 0].mul_(2)
        y[:, 1].add_(module[1](x))
        z = y.reshape(3, 8)
        z.relu_()
        return z.t()[1:]

    return Stage(nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 4)]), [torch.randn(3, 4)], forward)


def weight_into_view() -> Stage:
    """A parameter is written into a view of what an input gave: one node that runs another within."""

    def forward(module, x):
        y = module[0](x).clone()
        y[:, 0] = module[1].weight
        y[:, 1].mul_(module[1].weight)
        return module[0](y) * module[1].weight

    module = nn.ModuleList([nn.Linear(4, 4), Scaled(1, torch.mul)])
    return Stage(module, [torch.randn(3, 4)], forward, note="CopySlices")


def complex_numbers() -> Stage:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.fft(x @ self.weight).abs() @ self.weight.real

    return Stage(Complex(), [torch.randn(3, 4, dtype=torch.complex64)])


def autocast() -> Stage:
    def forward(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    return Stage(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
        [torch.randn(3, 8)],
        forward,
    )


def own_function() -> Stage:
    return Stage(
        nn.Sequential(nn.Linear(8, 8), Scaled(8, Twice.apply), nn.Linear(8, 8)),
        [torch.randn(3, 8)],
        note="TwiceBackward",
    )


def only_own_function() -> Stage:
    return Stage(Scaled(8, Twice.apply), [torch.randn(3, 8)], note="TwiceBackward", split=False)


def checkpointed() -> Stage:
    return Stage(
        nn.Sequential(Block(), Block()),
        [torch.randn(2, 6, 16)],
        lambda m, x: checkpoint.checkpoint(m[0], m[1](x), use_reentrant=False),
    )


def checkpointed_reentrant() -> Stage:
    return Stage(
        nn.Sequential(Block(), Block()),
        [torch.randn(2, 6, 16)],
        lambda m, x: checkpoint.checkpoint(m[0], m[1](x), use_reentrant=True),
        note="CheckpointFunctionBackward",
        split=False,
    )


def weight_norm() -> Stage:
    return sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3)
    )


def unused_input() -> Stage:
    return Stage(nn.Linear(4, 4), [torch.randn(3, 4), torch.randn(3, 4)], lambda m, x, _: m(x))


def nothing_from_inputs() -> Stage:
    module = nn.Linear(4, 4)
    return Stage(module, [torch.randn(3, 4)], lambda m, x: m.weight.sin())


def loss() -> Stage:
    return Stage(
        nn.Linear(8, 5),
        [torch.randn(3, 8)],
        lambda m, x: functional.cross_entropy(m(x), torch.tensor([0, 4, 2])),
    )


STAGES = {
    function.__name__: function
    for function in (
        mlp,
        transformer,
        attention_module,
        convolution,
        dropout,
        recurrent,
        gated,
        shared_weight,
        tied_four_times,
        several_outputs,
        several_inputs,
        input_twice,
        frozen,
        half_frozen,
        embedding,
        sparse_embedding,
        first_stage,
        views_in_place,
        weight_into_view,
        complex_numbers,
        autocast,
        own_function,
        only_own_function,
        checkpointed,
        checkpointed_reentrant,
        weight_norm,
        unused_input,
        nothing_from_inputs,
        loss,
    )
}
