"""Forecasts of a step against what it takes, on twelve models: bytes allocated, and reserved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.sizer import models
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import SIMULATED, settle
from torch import nn

FACTORS = (1, 4, 16)  # of a case's rows
SMALL = ("MLP", "encoder")  # at one size
ALLOWED = 0.03


def run(small: bool) -> Iterator[Check]:
    """Yields a check for each model, and the worst error of all; a forecast that is short counts twice."""
    errors: dict[str, float] = {}
    for name, case in models.CASES.items():
        if small and name not in SMALL:
            continue
        for factor in FACTORS[:1] if small else FACTORS:
            plan, peak = _measured(case, case.rows * factor)
            if plan is None:
                yield skipped("forecast", "refused: plan() gives none on a CUDA device")
                return
            error = plan.peak_bytes / peak - 1
            errors[f"{name}, {case.rows * factor} rows"] = error
            words = f"{plan.peak_bytes} bytes forecast, {peak} taken: {error:+.2%}"
            # A margin is part of a forecast; the peaks of the simulated device lack cuDNN's workspaces.
            good = SIMULATED or -1e-9 <= error <= ALLOWED
            yield check(f"{name}, {case.rows * factor} rows", good, words, error)
    if errors:
        worst = max(max(errors.values()), -2 * min(errors.values()))
        yield check("worst", SIMULATED or worst <= ALLOWED, f"{worst:.2%}", worst, errors=errors)


def _measured(case: models.Case, rows: int) -> tuple[Any, int]:
    """The plan of an unsplit step, and the peak of that step."""
    import brimful

    torch.manual_seed(0)
    model = case.make().cuda()
    batch = case.batch(rows).cuda()
    sizer = brimful.BatchSizer(model, predict=True)
    settle()
    plan = sizer.plan(batch, _loss)
    outcome = sizer.step(batch, _loss)
    model.zero_grad()
    return plan, int(outcome.peak_bytes)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return models.loss(model, x)
