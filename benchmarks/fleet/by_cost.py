"""How evenly rows of unlike lengths are shared by cost, and by rows. Computed, with drawn times: no step is run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import brimful
from benchmarks import common, intervals

LENGTHS = {"fleet.cost_uniform": "uniform", "fleet.cost_lognormal": "lognormal"}
IDS = tuple(LENGTHS)
RANKS = 8
ROWS_PER_RANK = 64
CROSSOVER = 512.0  # a row of n takes n + n * n / CROSSOVER
SLOWNESS = (1.0,) * (RANKS - 1) + (1.5,)
JITTER = 0.02
LAG = 6
SETTLING = 24
STEPS, QUICK_STEPS = 224, 40


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the slowest rank's time over that of work that can be divided at will, in the median."""
    steps = QUICK_STEPS if quick else STEPS
    for figure_id, name in LENGTHS.items():
        lengths = _lengths(name, (steps + 2) * RANKS * ROWS_PER_RANK)
        batch_cost = int(lengths.mean() * RANKS * ROWS_PER_RANK)
        by_cost = _uneven(lengths, steps, cost=lengths, batch_cost=batch_cost)
        by_rows = _uneven(lengths, steps, batch_size=RANKS * ROWS_PER_RANK)
        even = [1.0] * len(by_cost)
        found = intervals.median_ratio(by_cost, even)
        conditions = {
            **common.machine_conditions(),
            "by_rows": intervals.median(by_rows),
            "largest": max(by_cost),
            "largest_by_rows": max(by_rows),
        }
        yield common.Figure(
            figure_id,
            "ratio",
            found.value,
            found.low,
            found.high,
            peer="shares by rows",
            rounds=len(by_cost),
            conditions=conditions,
        )


def _lengths(name: str, rows: int) -> np.ndarray:
    random = np.random.default_rng(0)
    if name == "uniform":
        return random.integers(16, 513, rows)
    return np.clip(random.lognormal(np.log(64), 0.8, rows).astype(np.int64), 1, 512)


def _uneven(lengths: np.ndarray, steps: int, **batch: object) -> list[float]:
    random = np.random.default_rng(1)
    samplers = [
        brimful.GlobalSampler(len(lengths), rank=rank, world_size=RANKS, lag=LAG, **batch)
        for rank in range(RANKS)
    ]
    passes = [iter(sampler) for sampler in samplers]
    found = []
    speed = sum(1 / slowness for slowness in SLOWNESS)
    for step in range(steps):
        rows = [lengths[next(own)].astype(float) for own in passes]
        costs = [float((own + own * own / CROSSOVER).sum()) for own in rows]
        times = np.array(costs) * SLOWNESS
        measured = (times * random.lognormal(0, JITTER, RANKS)).tolist()
        for sampler in samplers:
            sampler._core.note(measured)
        if step >= SETTLING:
            found.append(float(times.max()) * speed / sum(costs))
    return found
