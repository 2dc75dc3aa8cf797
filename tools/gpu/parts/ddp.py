"""A step of one rank over NCCL, brimful's wrapper beside torch's DDP and the bare model: calls, collectives, time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.gpu.check import Check, check, skipped
from tools.gpu.device import NEEDS_HARDWARE, SIMULATED
from tools.gpu.race import Ended, best_of_torch, race

NAMES = ("bare", "torch, bucket views", "brimful")
CASES = ("ResNet-50 fp32", "GPT-2 fp32")
ROUNDS, STEPS = 10, 3
MORE_LAUNCHES = 1.02  # than torch's, and no more waits than one a step
SLOWER = 1.03


def run(small: bool) -> Iterator[Check]:
    """Yields for each model launches, waits and collectives, and on hardware idle gap and step time."""
    for case in CASES[1:] if small else CASES:
        try:
            found = race(case, NAMES, 1 if small else ROUNDS, 1 if small else STEPS, small)
        except Ended as error:
            yield check(case, False, f"a wrapper's process ended: {error}")
        else:
            yield from _checks(case, found)


def _checks(case: str, found: dict[str, Any]) -> Iterator[Check]:
    ours, theirs = (found["profile"][who] for who in ("brimful", best_of_torch(found["median_ms"])))
    for what, most in {
        "launches": theirs["launches"] * MORE_LAUNCHES,
        "waits": theirs["waits"] + 1,
        "idle_ms": float("inf"),
    }.items():
        words = f"{ours[what]:.1f} a step, torch's DDP {theirs[what]:.1f}"
        yield _judged(f"{case}: {what}", ours[what] <= most, words, ours[what])
    words = f"{ours['issued']:.1f} a step, torch's DDP {theirs['issued']:.1f}"
    yield check(
        f"{case}: collectives", ours["issued"] > 0 < theirs["issued"], words, ours["issued"]
    )
    overhead = found["overhead"]["brimful"]
    ratio = overhead["step"]["value"]
    words = ", ".join(f"{who} {ms:.2f} ms" for who, ms in found["median_ms"].items())
    facts = {"ms": found["ms"], "overhead": overhead}
    yield _judged(f"{case}: step time", ratio <= SLOWER, f"{words}: {ratio:.3f}", ratio, **facts)


def _judged(name: str, good: bool, words: str, value: float, **facts: Any) -> Check:
    return skipped(name, NEEDS_HARDWARE) if SIMULATED else check(name, good, words, value, **facts)
