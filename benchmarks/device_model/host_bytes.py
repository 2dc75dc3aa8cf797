"""The host's memory that a step of a large model takes on the device without arithmetic."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.device_model import device, large

IDS = ("device.host_bytes",)
QUICK_LAYERS = 2
BYTES_A_PARAMETER = 8  # itself, its gradient and AdamW's two moments, in bf16
TIMEOUT_S = 600


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the most that is resident in that step above what torch and a context take, in processes of their own."""
    conditions: dict[str, Any] = {**common.machine_conditions(), "device": device.NAME}
    try:
        empty, full = (_taken(layers) for layers in (0, QUICK_LAYERS if quick else large.LAYERS))
    except (device.Unavailable, subprocess.SubprocessError) as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    conditions |= {"empty": empty, "full": full}
    if full["device_bytes"] < BYTES_A_PARAMETER * full["parameters"]:
        why = f"the model's states are not on the device (bytes there: {full['device_bytes']})"
        yield common.unmeasured(IDS[0], why, conditions=conditions)
        return
    value = float(full["host_bytes"] - empty["host_bytes"])
    yield common.Figure(IDS[0], "bytes", value, value, value, rounds=1, conditions=conditions)


def _taken(layers: int) -> dict[str, int]:
    answer = device.ask("benchmarks.device_model.large", "--layers", layers, timeout_s=TIMEOUT_S)
    found: dict[str, int] = json.loads(answer)
    return found
