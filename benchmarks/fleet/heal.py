"""Kills a rank at a point of a step: how long the others need, and what becomes of rows and parameters."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.fleet import storm

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "python"))

import fleet_ranks

IDS = (
    "fleet.heal_s",
    "fleet.heal_total_s",
    "fleet.rows_bad",
    "fleet.exact_bad",
    "fleet.hang",
)
POINTS = ("before", "piece0", "piece1", "exchange", "accepted", "stepped", "between")
WORLD_SIZE, STEPS = 3, 8
KILLS, QUICK_KILLS = 100, 7
STORM_STEPS = 1000
DEAD_AFTER = {"dead_after_ms": 400}  # the default
DTYPES = (torch.float64, torch.float32)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
SEED = 11


@dataclass
class Seen:
    """Of all kills."""

    own_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    rows_bad: int = 0
    exact_bad: int = 0
    hangs: int = 0
    healed: int = 0  # kills after which a rank needed another's state


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the 95th percentile of the times, and how much was bad."""
    kills = QUICK_KILLS if quick else KILLS
    seen, draw = Seen(), random.Random(SEED)
    for kill in range(kills):
        dies = (POINTS[kill % len(POINTS)], draw.randrange(1, STEPS - 1))
        _kill(WORLD_SIZE, draw.randrange(WORLD_SIZE), dies, DTYPES[kill % 2], seen)
    of_three = len(seen.own_s)
    for size in () if quick else (2, 4):
        for victim in range(size):
            for point in POINTS:
                _kill(size, victim, (point, draw.randrange(1, STEPS - 1)), DTYPES[0], seen)
    through = storm.run(STORM_STEPS // 20 if quick else STORM_STEPS, SEED)
    seen.rows_bad += through.rows_bad
    seen.exact_bad += through.exact_bad
    seen.hangs += through.hangs
    conditions: dict[str, Any] = {
        **common.machine_conditions(),
        "backend": "gloo",
        "ranks": WORLD_SIZE,
        "kills": kills,
        "kills of one of two and of four": 0 if quick else (2 + 4) * len(POINTS),
        "one long run": through.conditions(),
        "heartbeat_ms": 50,
        "dead_after_ms": 400,
        "kills after which a rank got the state": seen.healed,
    }
    times_of = ((IDS[0], seen.own_s[:of_three]), (IDS[1], seen.total_s[:of_three]))
    for name, values in times_of:
        if not values:
            yield common.unmeasured(name, "no kill was survived", conditions=conditions)
            continue
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        times = {"median_s": ordered[len(ordered) // 2], "max_s": ordered[-1]}
        yield common.Figure(
            name, "s", p95, ordered[0], ordered[-1], rounds=kills, conditions=conditions | times
        )
    for name, bad in zip(IDS[2:], (seen.rows_bad, seen.exact_bad, seen.hangs), strict=True):
        yield common.Figure(name, "count", bad, bad, bad, rounds=kills, conditions=conditions)


def _kill(size: int, victim: int, dies: tuple[str, int], dtype: torch.dtype, seen: Seen) -> None:
    plan = fleet_ranks.Plan(world_size=size, dtype=dtype)
    with fleet_ranks.Ranks() as ranks:
        for index in range(size):
            own = dies if index == victim else None
            ranks.start(
                fleet_ranks.Plan(world_size=size, dtype=dtype, dies=own, options=dict(DEAD_AFTER))
            )
        try:
            answers = ranks.answers()
        except AssertionError as hang:
            print(f"{dies}, rank {victim}: {hang}", file=sys.stderr)
            seen.hangs += 1
            return
        ended = [result for how, result in answers if how == "ended"]
        killed = [line for line in ranks.lines(victim) if line[0] == "k"]
        seen.rows_bad += ranks.rows_bad(plan)
        if len(ended) != size - 1 or not killed:
            print(f"{dies}, rank {victim}: {answers}", file=sys.stderr)
            seen.exact_bad += 1
            return
        seen.exact_bad += fleet_ranks.exact_bad(plan, ended, TOLERANCE[dtype])
        last = [result["regroups"][-1] for result in ended if result["regroups"]]
        seen.own_s.append(max(each["form_s"] + each["heal_s"] for each in last))
        seen.total_s.append(max(each["at"] for each in last) - float(killed[0][2]))
        seen.healed += any(each["healed"] for each in last)
