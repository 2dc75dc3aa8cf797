"""What the pictures' runs share: a model, its batches, and a look behind every operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from chart import BLUE, GREEN, GREY, ORANGE, TEAL, VIOLET
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful import memory

MIB = 1 << 20
COLOURS = {
    "parameters": BLUE,
    "optimizer_state": TEAL,
    "gradients": GREEN,
    "activations": ORANGE,
    "temporaries": VIOLET,
    "other": GREY,
}


class EveryOperator(TorchDispatchMode):
    """Calls `look` behind every operator, backward's too, also where it raises."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._look()


def mlp(width: int = 512, depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def batch_of(rows: int, width: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width), torch.randint(10, (rows,))


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def used() -> float:
    return memory.stats("cpu").used_bytes / MIB
