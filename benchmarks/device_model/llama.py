"""A decoder like Llama: rotary positions, norms by the root mean square, gated layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

BASE = 10000.0  # of the positions' wavelengths


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(
            _turned(query, angles), _turned(key, angles), value, is_causal=True
        )
        out: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), angles)
        y = self.between(x)
        out: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Of 6.7 billion parameters, as it is."""

    def __init__(
        self,
        words: int = 32000,
        width: int = 4096,
        hidden: int = 11008,
        layers: int = 32,
        heads: int = 32,
    ) -> None:
        super().__init__()
        self.pairs = width // heads // 2
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))
        self.last = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        steps = torch.arange(self.pairs, device=x.device, dtype=torch.float32) / self.pairs
        angles = torch.outer(places, BASE**-steps)
        y = self.words(x)
        for block in self.blocks:
            y = block(y, angles)
        out: torch.Tensor = self.head(self.last(y))
        return out
