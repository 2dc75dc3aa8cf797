"""The time of a step by the plan that the ladder chooses, over the best of all plans that fit; all are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import common, intervals
from benchmarks.ladder import cases, plans
from benchmarks.sizer import models

IDS = ("ladder.time_over_best",)
BEST = "best of all plans"
RATES = (1_000_000_000, 100_000_000)  # bytes per second of the disk
SHARES = (0.9, 0.8, 0.7)  # of the peak with room
STEPS = 4  # under the limit; the first is recorded
TRIED = 2  # times that each plan is run, the faster counts
FINALISTS = 3
CLOSE = 1.2  # times the fastest: slower plans are no finalists
ROUNDS, QUICK_ROUNDS = (
    20,
    2,
)  # to find the best one in; and as many to compare the chosen one with it
MOST_MODULES = 6
EVEN = {"value": 1.0, "low": 1.0, "high": 1.0}


class Attending(nn.Module):
    """A sequence's layers of attention, each with its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4).unbind()
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: torch.Tensor = self.head(nn.functional.gelu(self.norm(x + self.out(y))))
        return out


def _narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64), nn.Tanh())


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "two layers": (_narrow, lambda: torch.randn(cases.ROWS, 1500, 64)),
    "attention": (Attending, lambda: torch.randn(cases.ROWS, 1000, 64)),
    "convolutions": (_convolutions, lambda: torch.randn(cases.ROWS, 3, 128, 128)),
    "LSTM": (models.Recurrent, lambda: torch.randn(cases.ROWS, 512, 32)),
}
QUICK_CASES = ("LSTM",)


@dataclass
class Tried:
    rungs: Any  # StepRungs
    peak_bytes: int
    seconds: float


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the largest ratio of all models, rates and limits."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    found: dict[str, dict[str, Any]] = {}
    for name in QUICK_CASES if quick else CASES:
        for rate in RATES[:1] if quick else RATES:
            with _disk(rate):
                found.update(_compare(name, rate, rounds))
    worst = max(found, key=lambda key: float(found[key]["ratio"]["value"]))
    ratio = found[worst]["ratio"]
    conditions = common.machine_conditions()
    conditions.update(
        cases=found,
        worst=worst,
        rates_bytes_per_s=RATES,
        value="wall time of a step by the chosen plan / the best of all that fit; waits for the disk count",
    )
    yield common.Figure(
        IDS[0], "ratio", ratio["value"], ratio["low"], ratio["high"], BEST, rounds, conditions
    )


@contextmanager
def _disk(rate: int) -> Iterator[None]:
    from brimful import _C

    _C._set_scratch_rate(rate)
    try:
        yield
    finally:
        _C._set_scratch_rate(0)


def _compare(name: str, rate: int, rounds: int) -> dict[str, dict[str, Any]]:
    """By limit: the plan that the ladder chose, and the best of those that fit."""
    import brimful

    torch.manual_seed(0)
    make, draw = CASES[name]
    model, batch = make(), draw()
    sizer = brimful.BatchSizer(model, predict=False, ladder="auto", batch_norm="freeze")

    def step(rungs: Any) -> Tried:
        plans.clear(model)
        before = plans.used_bytes()
        began = time.perf_counter()
        outcome = sizer.step(batch, models.loss, split=plans.ROW_BY_ROW, rungs=rungs)
        seconds = time.perf_counter() - began
        return Tried(outcome.rungs, int(outcome.peak_bytes) - before, seconds)

    none = brimful._C.StepRungs()
    plain = [step(none) for _ in range(3)][-1]
    _, modules = plans.recorded(model, batch)
    if len(modules.names()) > MOST_MODULES:
        raise RuntimeError(f"too many modules to try all plans (model: {name})")
    ways = [plans.named(modules, plan) for plan in plans.every(modules)]
    tried = [min((step(way) for _ in range(TRIED)), key=lambda t: t.seconds) for way in ways]
    found = {}
    for share in SHARES:
        limit = int(share * plain.peak_bytes)
        key = f"{name}, {rate / 1e6:g} MB/s, {share:.0%}"
        chosen = _choose(model, batch, limit)
        fitting = sorted((t for t in tried if t.peak_bytes <= limit), key=lambda t: t.seconds)
        if chosen is None:
            if fitting:
                raise RuntimeError(f"no plan was found where {fitting[0]} fits ({key})")
            print(f"  {key}: no plan fits", flush=True)
            continue
        near = [t for t in fitting if t.rungs != chosen and t.seconds < CLOSE * fitting[0].seconds]
        others = [t.rungs for t in near[:FINALISTS]]
        raced = {"ratio": EVEN, "chosen": plans.describe(chosen), "best": "no other"}
        found[key] = {
            **(_race(step, [chosen, *others], rounds) if others else raced),
            "plans": len(tried),
            "fitting": len(fitting),
            "limit_bytes": limit,
        }
        print(f"  {key}: {found[key]}", flush=True)
    plans.clear(model)
    return found


def _choose(model: nn.Module, batch: torch.Tensor, limit: int) -> Any:
    """The plan of the steps that follow the recorded one; None where nothing fits."""
    import brimful

    sizer = brimful.BatchSizer(
        model, predict=False, ladder="auto", batch_norm="freeze", pieces=cases.ROWS
    )
    plans.clear(model)
    outcome = None
    try:
        with plans.room(limit):
            for _ in range(STEPS):
                outcome = sizer.step(batch, models.loss)
                plans.clear(model)
    except brimful.BatchTooLarge:
        return None
    return None if outcome is None else outcome.rungs


def _race(step: Callable[[Any], Tried], rungs: list[Any], rounds: int) -> dict[str, Any]:
    """The first is the chosen one. The best of all in some rounds is compared with it in others: that is not biased."""
    wall = _rounds(step, rungs, rounds)
    best = min(range(len(rungs)), key=lambda place: intervals.median(wall[place]))
    wall = _rounds(step, [rungs[0], rungs[best]], rounds)
    return {
        "ratio": common.interval_dict(intervals.median_ratio(wall[0], wall[1])),
        "chosen": plans.describe(rungs[0]),
        "best": plans.describe(rungs[best]),
        "chosen_s": intervals.median(wall[0]),
        "best_s": intervals.median(wall[1]),
    }


def _rounds(step: Callable[[Any], Tried], rungs: list[Any], rounds: int) -> list[list[float]]:
    """Seconds of each in every round, in an order that rotates."""
    wall: list[list[float]] = [[] for _ in rungs]
    for number in range(-1, rounds):
        places = list(range(len(rungs)))
        for place in places[number % len(rungs) :] + places[: number % len(rungs)]:
            seconds = step(rungs[place]).seconds
            if number >= 0:
                wall[place].append(seconds)
    return wall
