"""How well a step's peak, forward, backward and optimizer, is forecast from three small sizes; exact bytes."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import common
from benchmarks.sizer import mem_tracker, models

IDS = ("sizer.predict_worst", "sizer.size_short")
TRACED = (2, 3, 16)
FACTORS = (12, 40, 200)  # of the smallest traced size
QUICK_FACTORS = (12,)
SHARE = 0.6  # of the peak at the largest size: the room in which the most rows are looked for
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the worst error, a shortfall counted twice, and by how many rows the size that is found falls short."""
    errors: dict[str, dict[str, float]] = {
        who: {} for who in ("ours", "line", "log-log", "MemTracker")
    }
    refused: dict[str, str] = {}  # what MemTracker could not take
    short: dict[str, float] = {}
    factors = QUICK_FACTORS if quick else FACTORS
    for name, case in models.CASES.items():
        for optimizer, make in OPTIMIZERS.items():
            step = _step_of(case, make)
            traces = [(rows, _trace(step, rows)) for rows in TRACED]
            from brimful import _C

            model = _C.PeakModel.fit(traces)
            peaks = {rows: _peak(step, rows) for rows in (1, 2, 4, 8, 16)}
            sizes = [factor * TRACED[0] for factor in factors]
            for rows in sizes:
                real = _peak(step, rows)
                told = {
                    "ours": math.inf if model is None else model.peak_bytes(rows),
                    "line": peaks[8] + (peaks[16] - peaks[8]) / 8 * (rows - 8),
                    "log-log": log_log(peaks, rows),
                }
                try:
                    told["MemTracker"] = mem_tracker.peak_bytes(case, rows, make)
                except Exception as error:
                    refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                for who, bytes in told.items():
                    errors[who][f"{name}, {optimizer}, {rows} rows"] = bytes / real - 1
            if model is not None:
                room = int(SHARE * _peak(step, sizes[-1]))
                found = model.largest_rows(room, sizes[-1])
                best = _most_rows(step, room, sizes[-1])
                short[f"{name}, {optimizer}"] = max(0, best - found - 1) / best
    conditions = common.machine_conditions()
    conditions.update(
        traced_rows=TRACED,
        models=len(models.CASES),
        worst={who: max(found.items(), key=lambda e: abs(e[1])) for who, found in errors.items()},
        lowest=min(errors["ours"].items(), key=lambda e: e[1]),
        value="max(largest error, 2 x largest shortfall)",
        mem_tracker_refused=refused,
    )
    print("\nsizer.predict_worst: error of the predicted peak")
    for who, found in errors.items():
        values = sorted(found.values())
        print(f"  {who:10s} from {values[0]:+.2%} to {values[-1]:+.2%}")
    ours = list(errors["ours"].values())
    yield _exact("sizer.predict_worst", worst_of(ours), len(ours), conditions)
    yield _exact(
        "sizer.size_short", max(short.values()), len(short), {**conditions, "short": short}
    )


def worst_of(errors: list[float]) -> float:
    """The largest error; one below the true peak, which ends in a refusal, counts twice."""
    return max(max(errors), -2 * min(errors))


def _exact(figure_id: str, value: float, rounds: int, conditions: dict[str, Any]) -> common.Figure:
    entry = common.load_ids()[figure_id]
    return common.Figure(
        figure_id, entry.unit, value, value, value, rounds=rounds, conditions=conditions
    )


def _step_of(
    case: models.Case, make: Callable[[Any], torch.optim.Optimizer]
) -> Callable[[int], None]:
    torch.manual_seed(0)
    model = case.make()
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step(rows: int) -> None:
        models.loss(model, case.batch(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # what is made once: the optimizer's state
        step(TRACED[0])
    return step


def _trace(step: Callable[[int], None], rows: int) -> list[int]:
    from brimful import _C

    gc.collect()
    with _C._TraceScope() as scope:
        step(rows)
    return scope.trace


def _peak(step: Callable[[int], None], rows: int) -> int:
    import brimful
    from brimful import _C

    gc.collect()
    before = brimful.memory.stats("cpu").used_bytes
    with _C._PeakScope("cpu") as scope:
        step(rows)
    return scope.peak_bytes - before


def log_log(peaks: dict[int, int], rows: int) -> float:
    """A straight line through the logarithms, by least squares."""
    xs = [math.log(x) for x in peaks]
    ys = [math.log(y) for y in peaks.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope = covariance / sum((x - mean_x) ** 2 for x in xs)
    return math.exp(mean_y + slope * (math.log(rows) - mean_x))


def _most_rows(step: Callable[[int], None], room: int, at_most: int) -> int:
    """By running them: the brute-force maximum."""
    fits, too_many = 1, at_most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _peak(step, middle) <= room:
            fits = middle
        else:
            too_many = middle
    return fits
