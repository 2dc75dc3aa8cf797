"""200 steps that fit only in pieces, under a limit and on a device that is full: shortages after the first steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from tools.gpu.check import Check, check
from tools.gpu.device import MIB, filled, room, settle
from torch import nn

STEPS, SMALL_STEPS = 200, 30
FIRST = 5  # in which the sizes that fit are found
ROOM = 40 * MIB


def run(small: bool) -> Iterator[Check]:
    """Yields the retries with a limit, without one, and both together."""
    ways = {"under a limit": room, "without a limit": filled}
    total, steps = 0, SMALL_STEPS if small else STEPS
    for name, way in ways.items():
        retries, pieces = _retries(way(ROOM), steps)
        late = [step for step, count in enumerate(retries) if count and step >= FIRST]
        total += sum(retries[FIRST:])
        found = sum(retries[:FIRST])
        words = f"{found} retries in the first {FIRST} steps, then in steps {late}; {pieces} pieces"
        yield check(name, found > 0 and not late, words, sum(retries[FIRST:]))
    yield check("shortages", total == 0, f"{total} in {steps} steps, twice", total, steps=steps)


def _retries(under: contextlib.AbstractContextManager[None], steps: int) -> tuple[list[int], int]:
    import brimful

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 16)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    x = torch.randn(2048, 16, device="cuda")

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), x)

    for rows in (8, 128, len(x)):  # what libraries take once, for each of their kernels
        sizer.step(x[:rows], loss_fn)
        optimizer.zero_grad()
    settle()
    sizer = brimful.BatchSizer(model, optimizer)
    retries = []
    with under:
        for _ in range(steps):
            outcome = sizer.step(x, loss_fn)
            retries.append(outcome.retries)
            optimizer.step()
            optimizer.zero_grad()
    return retries, outcome.pieces
