"""What the ladder adds to a step that needs none, in instructions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import callgrind, common
from benchmarks.probes import cost

IDS = ("ladder.idle",)
MODELS, QUICK_MODELS = ("cnn", "transformer"), ("tiny",)
WARM_UP_STEPS = 3
STEPS, QUICK_STEPS = 3, 2
SPLIT, AUTO = "split", "auto"


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the larger fraction of the models; a count has no interval, and one round is enough."""
    steps = QUICK_STEPS if quick else STEPS
    conditions = common.machine_conditions()
    conditions.update(
        value="instructions of a step with ladder='auto' / with ladder='split' - 1, rows fit, from Python",
        warm_up_steps=WARM_UP_STEPS,
        steps=steps,
    )
    above: dict[str, float] = {}
    try:
        callgrind.find_program(cost.COUNTED_LIBRARY)
        for name in QUICK_MODELS if quick else MODELS:
            counts = {ladder: _count(name, ladder, steps) for ladder in (SPLIT, AUTO)}
            above[name] = counts[AUTO] / counts[SPLIT] - 1
            conditions[name] = counts
            print(f"  {name}: {counts}, {above[name]:+.4%}", flush=True)
    except callgrind.Unavailable as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    worst = max(above, key=lambda name: above[name])
    conditions["worst"] = worst
    value = above[worst]
    yield common.Figure(
        IDS[0], "fraction", value, value, value, SPLIT, rounds=1, conditions=conditions
    )


def _count(name: str, ladder: str, steps: int) -> float:
    text = callgrind.profile(
        Path(sys.executable), "-m", "benchmarks.ladder.counted", name, ladder, str(steps)
    )
    return callgrind.total(text) / steps
