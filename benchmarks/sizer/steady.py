"""Steps under a limit of 60 % of what the unsplit batch takes: how many allocations are refused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import common
from benchmarks.sizer import models

IDS = ("sizer.steady_ooms", "sizer.converge_ooms")
SHARE = 0.6
STEPS = 100
QUICK_STEPS = 3


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the refusals with a forecast, in all steps, and the most of one model without."""
    import brimful

    steps = QUICK_STEPS if quick else STEPS
    found: dict[str, dict[str, Any]] = {}
    for name, case in models.CASES.items():
        torch.manual_seed(0)
        model = case.make()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        room = int(SHARE * _unsplit(brimful, model, case))
        found[name] = {
            how: _train(brimful, case, model, optimizer, room, steps, predict=how == "forecast")
            for how in ("forecast", "none")
        }
        print(f"  {name:15s} {found[name]}")
    conditions = common.machine_conditions()
    conditions.update(steps=steps, share=SHARE, models=found)
    ooms = {how: [entry[how]["ooms"] for entry in found.values()] for how in ("forecast", "none")}
    for figure_id, value in zip(IDS, (sum(ooms["forecast"]), max(ooms["none"])), strict=True):
        yield common.Figure(
            figure_id, "count", value, value, value, rounds=steps, conditions=conditions
        )


def _unsplit(brimful: Any, model: torch.nn.Module, case: models.Case) -> int:
    sizer = brimful.BatchSizer(model)
    batch = case.batch(case.rows)
    for _ in range(2):  # what is made once is made in the first
        gc.collect()
        before = brimful.memory.stats("cpu").used_bytes
        outcome = sizer.step(batch, models.loss)
        model.zero_grad()
    return int(outcome.peak_bytes - before)


def _train(
    brimful: Any,
    case: models.Case,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    room: int,
    steps: int,
    predict: bool,
) -> dict[str, Any]:
    sizer = brimful.BatchSizer(model, predict=predict)
    batch = case.batch(case.rows)
    gc.collect()
    before = brimful.memory.stats("cpu")
    brimful.memory.set_limit("cpu", before.used_bytes + room)
    try:
        for _ in range(steps):
            outcome = sizer.step(batch, models.loss)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        brimful.memory.set_limit("cpu", None)
    return {
        "ooms": brimful.memory.stats("cpu").ooms - before.ooms,
        "pieces": outcome.pieces,
        "fill": round((outcome.peak_bytes - before.used_bytes) / room, 3),
    }
