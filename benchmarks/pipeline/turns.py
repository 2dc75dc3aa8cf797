"""What it costs that stages which draw random numbers take turns with the generator that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import common, intervals

IDS = ("pipeline.turns", "pipeline.turns_checkpoint")
STAGES, MICROBATCHES, SIZE = 2, 16, 64
FORWARD_S = 0.002
WARM_UP = 3
ROUNDS, QUICK_ROUNDS = 30, 3
SHARED, OWN = "the shared generator", "generators of their own"


class Slow(torch.autograd.Function):
    """Takes the time of a device of its own: sleeps, twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * FORWARD_S)
        return gradient


class Stage(nn.Module):
    """A layer, a sleep and a dropout."""

    def __init__(self, generator: torch.Generator | None, checkpointed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.generator, self.checkpointed = generator, checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        h = Slow.apply(self.linear(x))
        return h * torch.bernoulli(torch.full_like(h, 0.5), generator=self.generator)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)


def figures(quick: bool) -> Iterator[common.Figure]:
    """Yields a step's time over that of the same stages with generators of their own."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    conditions = common.machine_conditions() | {
        "stages": STAGES,
        "microbatches": MICROBATCHES,
        "forward_ms": FORWARD_S * 1e3,
        "backward_ms": 2 * FORWARD_S * 1e3,
        "schedule": "1f1b",
    }
    for figure_id, checkpointed in zip(IDS, (False, True), strict=True):
        steps = {SHARED: _step(False, checkpointed), OWN: _step(True, checkpointed)}
        times: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(WARM_UP + rounds):
            for way in (SHARED, OWN) if number % 2 else (OWN, SHARED):
                began = time.perf_counter()
                steps[way]()
                if number >= WARM_UP:
                    times[way].append(time.perf_counter() - began)
        ratio = intervals.median_ratio(times[SHARED], times[OWN])
        medians = {way: intervals.median(seconds) * 1e3 for way, seconds in times.items()}
        yield common.Figure(
            figure_id,
            "ratio",
            ratio.value,
            ratio.low,
            ratio.high,
            OWN,
            rounds=rounds,
            conditions={**conditions, "checkpointed": checkpointed, "step_ms": medians},
        )


def _step(own: bool, checkpointed: bool) -> Callable[[], object]:
    import brimful

    generators = [torch.Generator().manual_seed(i) if own else None for i in range(STAGES)]
    stages = [Stage(generator, checkpointed) for generator in generators]
    pipe = brimful.Pipeline(stages, microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(MICROBATCHES, SIZE), torch.randn(MICROBATCHES, SIZE)

    def step() -> None:
        pipe.step(x, y)
        for stage in stages:
            stage.zero_grad()

    return step
