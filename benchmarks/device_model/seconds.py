"""The time of a step on the device without arithmetic, over that of the host's CPU, which computes it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from benchmarks import common, intervals
from benchmarks.device_model import device

IDS = ("device.seconds",)
PEER = "the host's CPU"
CASES = {"ResNet-50 fp32": 64, "GPT-2 fp32": 8}  # rows
ROUNDS = 3
QUICK_ROWS, QUICK_ROUNDS = 1, 1
TIMEOUT_S = 1800


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the larger ratio of the two models; the CPU has all its cores."""
    conditions: dict[str, Any] = {
        **common.machine_conditions(),
        "threads_per_rank": "torch's own choice",
        "device": device.NAME,
    }
    rounds = QUICK_ROUNDS if quick else ROUNDS
    ratios: dict[str, intervals.Interval] = {}
    for model, rows in CASES.items():
        try:
            taken = _taken(model, QUICK_ROWS if quick else rows, rounds)
        except (device.Unavailable, subprocess.SubprocessError) as error:
            yield common.unmeasured(IDS[0], f"{model}: {error}", conditions=conditions)
            return
        ratios[model] = intervals.median_ratio(taken["cuda"], taken["cpu"])
        conditions[model] = {
            "rows": QUICK_ROWS if quick else rows,
            "ratio": common.interval_dict(ratios[model]),
            **{f"{where}_s": round(intervals.median(taken[where]), 4) for where in taken},
        }
    worst = max(ratios.values(), key=lambda ratio: ratio.value)
    yield common.Figure(
        IDS[0],
        "ratio",
        worst.value,
        worst.low,
        worst.high,
        peer=PEER,
        rounds=rounds,
        conditions=conditions,
    )


def _taken(model: str, rows: int, rounds: int) -> dict[str, list[float]]:
    answer = device.ask("benchmarks.device_model.timed", model, rows, rounds, timeout_s=TIMEOUT_S)
    found: dict[str, list[float]] = json.loads(answer)
    return found
