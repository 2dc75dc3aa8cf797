"""The sizer's twelve models with rows that are large, a decoder and an encoder of twelve blocks, and a deep U-Net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.sizer import models

ROWS = 2  # the second piece of a step finds gradients
WIDTH, HEADS, BLOCKS = 64, 4, 12


@dataclass(frozen=True)
class Case:
    """`draw`: a batch of so many rows, each of so large a size: words, pixels a side, or vectors."""

    make: Callable[[], nn.Module]
    draw: Callable[[int, int], torch.Tensor]
    size: int
    small: int  # a step of a few hundred allocations, for faults

    def batch(self, rows: int) -> torch.Tensor:
        return self.draw(rows, self.size)


class Blocks(nn.Module):
    """A language model of `blocks` blocks: a decoder, or an encoder."""

    def __init__(self, causal: bool, blocks: int = BLOCKS, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal = causal
        self.words = nn.Embedding(models.WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=dropout, batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 8)

    def mask(self, x: torch.Tensor) -> torch.Tensor | None:
        if not self.causal:
            return None
        return nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask(x)
        y = self.words(x)
        for block in self.blocks:
            y = block(y, src_mask=mask, is_causal=self.causal)
        out: torch.Tensor = self.head(y)
        return out


class Level(nn.Sequential):
    """Two convolutions of a U-Net's level."""

    def __init__(self, into: int, out: int) -> None:
        layers: list[nn.Module] = []
        for channels in (into, out):
            layers += [
                nn.Conv2d(channels, out, 3, padding=1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class DeepUNet(nn.Module):
    """Of three levels with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Level(3, 8), Level(8, 16), Level(16, 32)])
        self.middle = Level(32, 32)
        self.up = nn.ModuleList([Level(64, 16), Level(32, 8), Level(16, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level in self.down:
            skips.append(level(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        out: torch.Tensor = self.head(x)
        return out


def _words(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, models.WORDS, (rows, length))


def _image(rows: int, side: int) -> torch.Tensor:
    return torch.randn(rows, 3, side, side)


def _vectors(width: int) -> Callable[[int, int], torch.Tensor]:
    return lambda rows, count: torch.randn(rows, count, width)


def _of(
    name: str, draw: Callable[[int, int], torch.Tensor], size: int, small: int
) -> tuple[str, Case]:
    return name, Case(models.CASES[name].make, draw, size, small)


CASES: dict[str, Case] = dict(
    [
        _of("MLP", _vectors(128), 2000, 8),
        _of("wide MLP", _vectors(256), 1000, 8),
        _of("conv + BN", _image, 128, 16),
        _of("ResNet", _image, 128, 16),
        _of("U-Net", _image, 128, 16),
        _of("encoder", _words, 256, 24),
        _of("ragged decoder", lambda rows, n: models.ragged(rows, n, n // 4), 256, 24),
        _of("LSTM", _vectors(32), 512, 16),
        _of("embeddings", lambda rows, n: torch.randint(0, 2000, (rows, n)), 10000, 20),
        _of("checkpointed", _vectors(128), 1500, 8),
        _of("frozen trunk", _vectors(128), 2000, 8),
        _of("in-place ReLU", _vectors(128), 2000, 8),
        ("decoder of 12", Case(lambda: Blocks(True, dropout=0.1), _words, 128, 16)),
        ("deep U-Net", Case(DeepUNet, _image, 128, 16)),
    ]
)
