"""Forecasts of a step against what it takes, on twelve models: bytes allocated, and reserved."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from benchmarks.sizer import models
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import MIB, SIMULATED, room, settle

FACTORS = (1, 4, 16)  # of a case's rows
SMALL = ("MLP", "encoder")  # at one size
ALLOWED = 0.03
SHARE = 0.7  # of what the unsplit step took, and what libraries take: the room in which it must not run out
LIBRARIES = 64 * MIB
SLACK = 16 * 1024  # bytes: losses and weights of pieces, which a plan has beside its peak


def run(small: bool) -> Iterator[Check]:
    """Yields three checks for each model and size, and the worst error; a forecast that is short counts twice."""
    errors: dict[str, float] = {}
    for name, case in models.CASES.items():
        if small and name not in SMALL:
            continue
        for factor in FACTORS[:1] if small else FACTORS:
            rows = case.rows * factor
            found, checks = _forecast(f"{name}, {rows} rows", case, rows)
            errors |= found
            yield from checks
    if errors:
        worst = max(max(errors.values()), -2 * min(errors.values()))
        good = SIMULATED or worst <= ALLOWED  # its peaks lack cuDNN's workspaces
        yield check("worst", good, f"{worst:.2%}", worst, errors=errors)


def _forecast(name: str, case: models.Case, rows: int) -> tuple[dict[str, float], list[Check]]:
    """The errors of an unsplit step's peaks, and whether a plan for less room than it took has room."""
    import brimful

    torch.manual_seed(0)
    model = case.make().cuda()
    batch = case.batch(rows).cuda()
    sizer = brimful.BatchSizer(model, predict=True)
    settle()
    plan = sizer.plan(batch, models.loss)
    if plan is None:
        return {}, [skipped(name, "refused: plan() gives none")]
    used = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    peak = int(sizer.step(batch, models.loss).peak_bytes)
    reserved = torch.cuda.max_memory_reserved()
    model.zero_grad()
    told = {
        name: (plan.peak_bytes, peak),
        f"{name}: reserved": (plan.reserved_bytes or 0, reserved),
    }
    errors = {what: _error(*bytes) for what, bytes in told.items()}
    checks = [
        check(
            what,
            SIMULATED or 0 <= errors[what] <= ALLOWED,
            f"{forecast} bytes forecast, {taken} taken: {errors[what]:+.2%}",
            errors[what],
        )
        for what, (forecast, taken) in told.items()
    ]
    with room(int(SHARE * (peak - used)) + LIBRARIES):
        outcome = sizer.step(batch, models.loss)
    model.zero_grad()
    fits = f"{outcome.pieces} pieces, {outcome.retries} retries"
    less = check(f"{name}: in less room", outcome.retries == 0, fits, outcome.retries)
    return errors, [*checks, less]


def _error(forecast: int, taken: int) -> float:
    """As a share of what was taken; below 0 where the forecast is short of it."""
    short = taken - forecast
    return 0.0 if 0 <= short <= SLACK else -short / taken
