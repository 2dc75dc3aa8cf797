"""ResNet-50, and a decoder of GPT-2's size (124M), with a loss and a batch of each."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *_conv(into, width, 1, 1), *_conv(width, width, 3, stride), *_conv(width, out, 1, 1)[:2]
        )
        whole = stride == 1 and into == out
        self.shortcut = nn.Identity() if whole else nn.Sequential(*_conv(into, out, 1, stride)[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(into: int, out: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(out), nn.ReLU()]


def resnet50(width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """The model of 25.6 million parameters; narrower and shallower for a test."""
    layers = [*_conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    into = width
    for k, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if k > 0 and block == 0 else 1
            layers.append(Bottleneck(into, width << k, stride))
            into = 4 * width << k
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 1000))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.merged = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inside = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.mixed(self.before(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merged(seen.transpose(1, 2).reshape(rows, length, width))
        out: torch.Tensor = x + self.inside(self.between(x))
        return out


class Gpt(nn.Module):
    def __init__(
        self, words: int = 50257, length: int = 1024, width: int = 768, layers: int = 12
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        return F.linear(self.last(y), self.words.weight)


def image_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of random classes, which a row's pixels decide."""
    return F.cross_entropy(model(x), x.flatten(1)[:, :1000].argmax(1))


def word_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of the next word."""
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
