"""What the ladder adds to a step that needs none, in instructions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import callgrind, common
from benchmarks.probes import cost

IDS = ("ladder.idle",)
MODEL, QUICK_MODEL = "cnn", "tiny"
WARM_UP_STEPS = 3
STEPS, QUICK_STEPS = 3, 2
SPLIT, AGAIN, AUTO = "split", "split again", "auto"


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the fraction; a count has no interval, and one round is enough."""
    steps = QUICK_STEPS if quick else STEPS
    conditions = common.machine_conditions()
    conditions.update(
        value="instructions of a step with ladder='auto' / with ladder='split' - 1, rows fit, from Python",
        warm_up_steps=WARM_UP_STEPS,
        steps=steps,
    )
    model = QUICK_MODEL if quick else MODEL
    try:
        callgrind.find_program(cost.COUNTED_LIBRARY)
        counts = {way: _count(model, way, steps) for way in (SPLIT, AUTO, AGAIN)}
    except callgrind.Unavailable as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    value = counts[AUTO] / counts[SPLIT] - 1
    conditions.update(model=model, counts=counts, a_a=counts[AGAIN] / counts[SPLIT] - 1)
    print(f"\nladder.idle: {value:+.4%}, {counts}", flush=True)
    yield common.Figure(
        IDS[0], "fraction", value, value, value, SPLIT, rounds=1, conditions=conditions
    )


def _count(name: str, way: str, steps: int) -> float:
    ladder = AUTO if way == AUTO else SPLIT
    module = "benchmarks.ladder.counted"
    text = callgrind.profile(
        Path(sys.executable), "-m", module, name, ladder, str(steps), late=True
    )
    return callgrind.total(text) / steps
