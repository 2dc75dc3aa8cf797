"""Figures that parts of `make gpu` find: bytes that a retry finds left over, shortages in steady use, forecasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tools.gpu.catalogue import BY_NAME
from tools.gpu.check import Check
from tools.gpu.runner import run_part

from benchmarks import common
from benchmarks.cuda.device import Device, count, device

IDS = ("cuda.steady_ooms", "cuda.retry_bytes", "cuda.forecast_worst")
ALLOCATORS = ("oom", "oom_expandable", "oom_async")


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields each figure as its parts are done."""
    here = device()
    if here is None:
        yield from (common.unmeasured(name, common.NEEDS_CUDA) for name in IDS)
        return
    yield _steady(here, quick)
    yield _retry_bytes(here, quick)
    if here.simulated:
        yield common.unmeasured(IDS[2], common.NEEDS_CUDA, conditions={"device": here.name})
    else:
        yield _forecast(here, quick)


def _checks(name: str, here: Device, quick: bool) -> list[Check]:
    part = BY_NAME[name]
    environment = {**here.environment, **part.environment}
    checks, _ = run_part(dataclasses.replace(part, environment=environment), quick)
    return checks


def _failed(figure_id: str, checks: list[Check]) -> common.Figure:
    return common.unmeasured(figure_id, "; ".join(f"{c.name}: {c.words}" for c in checks)[:500])


def _steady(here: Device, quick: bool) -> common.Figure:
    checks = _checks("steady", here, quick)
    found = [check for check in checks if check.name == "shortages"]
    if not found or found[0].value is None:
        return _failed(IDS[0], checks)
    steps = int(found[0].facts["steps"])
    words = {check.name: check.words for check in checks}
    return count(IDS[0], found[0].value, here, steps, found=words)


def _retry_bytes(here: Device, quick: bool) -> common.Figure:
    worst, places = 0.0, {}
    for name in ALLOCATORS:
        checks = _checks(name, here, quick)
        found = [check for check in checks if check.name == "retry bytes"]
        entries = [check for check in checks if check.name.endswith("bytes at entry")]
        # Where nothing was retried nothing was left over.
        if (
            not found
            or found[0].value is None
            or any(c.outcome != "ok" and not c.value for c in entries)
        ):
            return _failed(IDS[1], checks)
        worst = max(worst, found[0].value)
        places[name] = {check.name: check.words for check in entries}
    return count(IDS[1], worst, here, len(ALLOCATORS), allocators=places)


def _forecast(here: Device, quick: bool) -> common.Figure:
    checks = _checks("forecast", here, quick)
    found = [check for check in checks if check.name == "worst"]
    if not found or found[0].value is None:
        return _failed(IDS[2], checks)
    errors = found[0].facts["errors"]
    return count(IDS[2], found[0].value, here, len(errors), errors=errors)
