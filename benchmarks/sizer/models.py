"""Twelve small models of the kinds that people train, with batches of a given number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS = 200
LENGTH = 24


@dataclass(frozen=True)
class Case:
    """`rows`: of a batch whose activations outweigh the parameters, for a model in steady use.

    `draw`: a batch of another width each time, for a model that takes several; `batch` gives the widest of them.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], torch.Tensor]
    rows: int
    draw: Callable[[int], torch.Tensor] | None = None


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_conv(3, 8), _conv(8, 16)])
        self.middle = _conv(16, 16)
        self.up = nn.ModuleList([_conv(32, 8), _conv(16, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            skips.append(torch.relu(block(x)))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = torch.relu(self.middle(x))
        for block in self.up:
            x = torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1)
            x = torch.relu(block(x))
        out: torch.Tensor = self.head(x)
        return out


class Transformer(nn.Module):
    """An encoder, or a decoder over sequences of several lengths, padded with word 0."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.words = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(32, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = padding = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
            padding = (x == 0) * -1e9
        y = self.words(x)
        for layer in self.layers:
            y = layer(y, src_mask=mask, src_key_padding_mask=padding)
        return self.head(y).logsumexp(-1) * (x != 0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(32, 48, 2, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x)[0])
        return out


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(x).mean(1))
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_perceptron(128, 256, 128) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _conv(into: int, out: int) -> nn.Conv2d:
    return nn.Conv2d(into, out, 3, padding=1)


def _perceptron(*sizes: int, inplace: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for k in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[k], sizes[k + 1]), nn.ReLU(inplace=inplace)]
    return nn.Sequential(*layers[:-1])


def _convolutions() -> nn.Module:
    first = [_conv(3, 16), nn.BatchNorm2d(16), nn.ReLU()]
    second = [nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _residual() -> nn.Module:
    body = [_conv(3, 16), Residual(16), nn.MaxPool2d(2), nn.Conv2d(16, 32, 1), Residual(32)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _frozen() -> nn.Module:
    module = _perceptron(128, 256, 256, 10)
    module[:3].requires_grad_(False)
    return module


def ragged(rows: int, longest: int = LENGTH, shortest: int = LENGTH // 4) -> torch.Tensor:
    """Rows of several lengths, padded with word 0 to the longest."""
    lengths = torch.randint(shortest, longest + 1, (rows, 1))
    lengths[0] = longest
    return torch.randint(1, WORDS, (rows, longest)) * (torch.arange(longest) < lengths)


def _of_any_width(rows: int) -> torch.Tensor:
    return ragged(rows, int(torch.randint(LENGTH // 4, LENGTH + 1, ())))


def _image(side: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, 3, side, side)


def _row(*sizes: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, *sizes)


CASES = {
    "MLP": Case(lambda: _perceptron(128, 256, 256, 10), _row(128), 3000),
    "wide MLP": Case(lambda: _perceptron(256, 1024, 256), _row(256), 4000),
    "conv + BN": Case(_convolutions, _image(32), 128),
    "ResNet": Case(_residual, _image(16), 128),
    "U-Net": Case(UNet, _image(16), 128),
    "encoder": Case(
        lambda: Transformer(False), lambda rows: torch.randint(1, WORDS, (rows, LENGTH)), 128
    ),
    "ragged decoder": Case(lambda: Transformer(True), ragged, 128, _of_any_width),
    "LSTM": Case(Recurrent, _row(16, 32), 300),
    "embeddings": Case(Bag, lambda rows: torch.randint(0, 2000, (rows, 20)), 2000),
    "checkpointed": Case(Checkpointed, _row(128), 6000),
    "frozen trunk": Case(_frozen, _row(128), 4000),
    "in-place ReLU": Case(lambda: _perceptron(128, 256, 256, 10, inplace=True), _row(128), 3000),
}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x).square().mean()
    return out
