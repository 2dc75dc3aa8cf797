"""Whether what a device took lies between the least and the most that the device without arithmetic takes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.device_model import device, recorded

IDS = ("device.interval_misses",)
LEFT_OUT = ("model", "size")
# A peak counts what the allocator leaves unsplit, up to 1 MiB in each block: it may be more with fewer workspaces.
SLACK_BYTES, SLACK_PART = 64 << 10, 0.005


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields how many recorded peaks lie outside, without the workspaces of the model and without those of the size."""
    conditions: dict[str, Any] = {
        **common.machine_conditions(),
        "device": device.NAME,
        "of_torch": recorded.TORCH,
    }
    files = recorded.FILES[:1] if quick else None
    missed: dict[str, list[int]] = {}
    widest: dict[str, float] = {}
    rounds = 0
    try:
        for of in LEFT_OUT:
            ends = (recorded.steps(files, of, unknown) for unknown in ("least", "most"))
            for least, most in zip(*ends, strict=True):
                rounds += 1
                taken = [step.here["peak_over_base"] for step in (least, most)]
                there = least.there["peak_over_base"]
                name = f"{least.model}, without the {of}'s"
                widest[name] = max(widest.get(name, 1.0), round(taken[1] / taken[0], 3))
                slack = max(SLACK_BYTES, SLACK_PART * there)
                if not taken[0] - slack <= there <= taken[1] + slack:
                    missed[f"{name}, {least.rows} rows"] = [taken[0], there, taken[1]]
    except (device.Unavailable, subprocess.SubprocessError) as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    found = {"missed": missed, "most_by_least": widest}
    value = float(len(missed))
    yield common.Figure(
        IDS[0], "count", value, value, value, rounds=rounds, conditions={**conditions, **found}
    )
