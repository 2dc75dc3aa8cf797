"""A rank whose work sleeps for each of its rows, in a loop over a global batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks import common

ROWS_PER_RANK = 64
EVENLY = 10_000  # steps before a share follows an outcome

#: By rank, how many times as long a row takes in this step.
Slowness = Callable[[int], Sequence[float]]


class Rows(Dataset[torch.Tensor]):
    """Rows that cost nothing to load."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index % 7))


@dataclass
class Steps:
    """What a rank saw, step by step."""

    seconds: list[float] = field(default_factory=list)
    shares: list[list[int]] = field(default_factory=list)


def conditions(ms_per_row: float) -> dict[str, Any]:
    """Returns what all figures of ranks whose work sleeps are measured under."""
    return {
        **common.machine_conditions(),
        "backend": "gloo",
        "rows_per_rank": ROWS_PER_RANK,
        "ms_per_row": ms_per_row,
    }


def ideal_ms(ms_per_row: float, slowness: Sequence[float]) -> float:
    """Returns the time of a step whose rows could be divided at will."""
    rows = ROWS_PER_RANK * len(slowness)
    return ms_per_row * rows / sum(1 / slow for slow in slowness)


def largest_ms(ms_per_row: float, slowness: Sequence[float], shares: Sequence[int]) -> float:
    """Returns the time of the slowest rank's work."""
    return ms_per_row * max(slow * rows for slow, rows in zip(slowness, shares, strict=True))


def run(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    steps: int,
    ms_per_row: float,
    slowness: Slowness,
    lag: int,
) -> Steps:
    """Trains `steps` steps on each rank; `lag` EVENLY keeps the shares even."""
    import brimful

    torch.manual_seed(0)
    model = brimful.DistributedDataParallel(nn.Linear(8, 8))
    sizer = brimful.BatchSizer(model)
    batch_size = ROWS_PER_RANK * world_size
    data = Rows(batch_size * steps)
    sampler = brimful.GlobalSampler(data, batch_size=batch_size, lag=lag)
    now = 0

    def loss_fn(model: Any, piece: torch.Tensor) -> torch.Tensor:
        time.sleep(1e-3 * ms_per_row * slowness(now)[rank] * len(piece))
        loss: torch.Tensor = model(piece).square().mean()
        return loss

    seen = Steps()
    began = None
    for batch in sizer.batches(DataLoader(data, batch_sampler=sampler)):
        seen.shares.append(sampler.shares)
        sizer.step(batch, loss_fn)
        model.zero_grad()
        if began is not None:
            seen.seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        now += 1
        progress()
    return seen
