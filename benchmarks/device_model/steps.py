"""Bytes and events of recorded steps on the device without arithmetic, against what the device itself took."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.device_model import device, recorded

IDS = ("device.allocated_worst", "device.reserved_worst", "device.events_equal")
LEFT_OUT = ("model", "size")
SMALL = 1 << 20  # below it a peak is not judged by its part
SEGMENT = 20 << 20  # of torch's allocator, from which blocks up to 10 MiB are cut


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the worst errors over all steps, and the share of steps whose events are equal.

    Recorded workspaces of cuDNN prove nothing of themselves: the errors are the worst without those of the model,
    and without those of its size alone.
    """
    conditions: dict[str, Any] = {
        **common.machine_conditions(),
        "device": device.NAME,
        "of_torch": recorded.TORCH,
    }
    files = recorded.FILES[:1] if quick else None
    try:
        taken = {left_out: list(recorded.steps(files, left_out)) for left_out in LEFT_OUT}
    except (device.Unavailable, subprocess.SubprocessError) as error:
        for name in IDS:
            yield common.unmeasured(name, str(error), conditions=conditions)
        return
    for name, error_of in ((IDS[0], _allocated), (IDS[1], _reserved)):
        worst = {of: {_place(step): error_of(step) for step in taken[of]} for of in LEFT_OUT}
        plain = [error_of(step) for step in taken["model"] if not step.library]
        found = {
            "worst_of_models": {of: _by_model(errors) for of, errors in worst.items()},
            "worst_without_library": max(plain, default=None),
        }
        value = max(error for errors in worst.values() for error in errors.values())
        yield _figure(name, value, len(worst["model"]), {**conditions, **found})
    plain_steps = [step for step in taken["model"] if not step.library]
    different = {_place(step): step.first_difference() for step in plain_steps if not step.equal}
    share = sum(step.equal for step in plain_steps) / len(plain_steps)
    yield _figure(IDS[2], share, len(plain_steps), {**conditions, "different": different})


def _figure(name: str, value: float, rounds: int, conditions: Any) -> common.Figure:
    return common.Figure(
        name, "fraction", value, value, value, rounds=rounds, conditions=conditions
    )


def _place(step: recorded.Step) -> str:
    return f"{step.model}, {step.rows} rows"


def _allocated(step: recorded.Step) -> float:
    own = abs(step.error("peak_over_base")) if step.there["peak_over_base"] >= SMALL else 0.0
    return max(own, abs(step.total_error()))


def _reserved(step: recorded.Step) -> float:
    """Within one segment there is no error."""
    off = abs(step.here["reserved_over_base"] - step.there["reserved_over_base"])
    return 0.0 if off <= SEGMENT else abs(step.error("reserved_over_base"))


def _by_model(errors: dict[str, float]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for place, error in errors.items():
        model = place.rsplit(", ", 1)[0]
        worst[model] = max(worst.get(model, 0.0), round(error, 4))
    return worst
