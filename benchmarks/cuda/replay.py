"""Torch's CUDA allocator beside its model: peaks of steps, and those of their requests replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.cuda.device import ROOT, Device, count, device

IDS = ("cuda.replay_worst",)
DIVISORS, QUICK_DIVISORS = (64, 8, 1), (64,)  # of each model's rows
RESERVED_WEIGHT = 3  # an error of 3 % there counts as one of 1 % of the allocated bytes


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the largest error: of the allocated peak, or a third of that of the reserved one."""
    here = device()
    if here is None:
        yield common.unmeasured(IDS[0], common.NEEDS_CUDA)
        return
    steps = _steps(here, QUICK_DIVISORS if quick else DIVISORS)
    worst = {of: max(abs(step[of]) for step in steps) for of in ("allocated", "reserved")}
    yield count(
        IDS[0],
        max(worst["allocated"], worst["reserved"] / RESERVED_WEIGHT),
        here,
        len(steps),
        events=sum(step["events"] for step in steps),
        different_events=sum(step["different"] for step in steps),
        worst=worst,
    )


def _steps(here: Device, divisors: tuple[int, ...]) -> list[dict[str, Any]]:
    program = [sys.executable, "-m", "benchmarks.cuda.replay_steps", *map(str, divisors)]
    found = subprocess.run(
        program,
        cwd=ROOT,
        env={**os.environ, **here.environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
