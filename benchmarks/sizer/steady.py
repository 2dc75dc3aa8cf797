"""Steps under a limit below what the unsplit batch takes, a new batch in each: how many allocations are refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import common
from benchmarks.sizer import models

IDS = ("sizer.steady_ooms", "sizer.converge_ooms")
SHARE = 0.6  # of the unsplit peak
DROPS = (0.8, 0.6, 0.45, 0.3)
STEPS, QUICK_STEPS = 100, 3
STEPS_OF_A_DROP, QUICK_STEPS_OF_A_DROP = 25, 2

Draw = Callable[[int], torch.Tensor]


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the refusals with a forecast, in all steps, and the most of one drop of the limit without."""
    steps = QUICK_STEPS if quick else STEPS
    steps_of_a_drop = QUICK_STEPS_OF_A_DROP if quick else STEPS_OF_A_DROP
    steady: dict[str, dict[str, Any]] = {}
    dropped: dict[str, list[dict[str, Any]]] = {}
    for name, case in models.CASES.items():
        torch.manual_seed(0)
        model = case.make()
        unsplit = _unsplit(model, case)
        draw = case.draw or case.batch
        steady[name] = _Run(model, case, draw, predict=True).under(int(SHARE * unsplit), steps)
        run = _Run(model, case, case.batch, predict=False)
        dropped[name] = [run.under(int(share * unsplit), steps_of_a_drop) for share in DROPS]
        print(f"  {name:15s} {steady[name]}, drops: {[drop['ooms'] for drop in dropped[name]]}")
    conditions = common.machine_conditions()
    conditions.update(steps=steps, share=SHARE, models=steady)
    value = sum(found["ooms"] for found in steady.values())
    yield common.Figure(
        IDS[0], "count", value, value, value, rounds=steps, conditions=dict(conditions)
    )
    conditions.update(steps=steps_of_a_drop, share=DROPS, models=dropped)
    value = max(drop["ooms"] for drops in dropped.values() for drop in drops)
    yield common.Figure(
        IDS[1], "count", value, value, value, rounds=steps_of_a_drop, conditions=conditions
    )


def _unsplit(model: torch.nn.Module, case: models.Case) -> int:
    import brimful

    sizer = brimful.BatchSizer(model)
    batch = case.batch(case.rows)
    for _ in range(2):  # what is made once is made in the first
        gc.collect()
        before = brimful.memory.stats("cpu").used_bytes
        outcome = sizer.step(batch, models.loss)
        model.zero_grad()
    return int(outcome.peak_bytes - before)


class _Run:
    """Training of a model under one limit after another, with an optimizer whose state its first step makes."""

    def __init__(
        self, model: torch.nn.Module, case: models.Case, draw: Draw, predict: bool
    ) -> None:
        import brimful

        torch.manual_seed(1)
        self.memory = brimful.memory
        self.optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        self.sizer = brimful.BatchSizer(model, self.optimizer, predict=predict)
        self.draw, self.rows = draw, case.rows
        self.batch = case.batch(case.rows)
        gc.collect()
        self.before = self.memory.stats("cpu").used_bytes

    def under(self, room: int, steps: int) -> dict[str, Any]:
        """Refusals and pieces of steps with `room` beyond what was in use at first."""
        refused = self.memory.stats("cpu").ooms
        pieces: list[int] = []
        self.memory.set_limit("cpu", self.before + room)
        try:
            for _ in range(steps):
                self.batch = self.draw(self.rows)
                outcome = self.sizer.step(self.batch, models.loss)
                pieces.append(outcome.pieces)
                self.optimizer.step()
                self.optimizer.zero_grad()
        finally:
            self.memory.set_limit("cpu", None)
        return {
            "ooms": self.memory.stats("cpu").ooms - refused,
            "pieces": [min(pieces), max(pieces)],
            "fill": round((outcome.peak_bytes - self.before) / room, 3),
        }
