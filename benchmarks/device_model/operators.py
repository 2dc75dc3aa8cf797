"""torch's own operators on the device without arithmetic: the share that runs, and what ends otherwise."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.device_model import device

IDS = ("device.ops",)
EVERY_WHEN_QUICK = 8
TESTS = Path(__file__).resolve().parents[2] / "tests" / "cuda_sim"


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the share of operators that run, of those that need nothing which is not there.

    `failed` names the others and says why; `sentence` names the operators that end with a sentence.
    """
    conditions: dict[str, Any] = {**common.machine_conditions(), "device": device.NAME}
    try:
        conditions["of_torch"] = _version_of_torch()
        found = _outcomes(EVERY_WHEN_QUICK if quick else 1)
    except (device.Unavailable, RuntimeError, subprocess.SubprocessError) as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    yield figure(found, conditions)


def figure(found: list[tuple[str, str, str]], conditions: dict[str, Any]) -> common.Figure:
    """Returns the figure of operators with their outcomes and words."""
    runs = sum(outcome == "runs" for _, outcome, _ in found)
    failed = {name: words[:120] for name, outcome, words in found if outcome in ("error", "ends")}
    counted = runs + len(failed)
    share = runs / counted
    named = {
        "failed": failed,
        **{
            kind: sorted(n for n, outcome, _ in found if outcome == kind)
            for kind in ("sentence", "none")
        },
    }
    return common.Figure(
        IDS[0], "fraction", share, share, share, rounds=counted, conditions={**conditions, **named}
    )


def _version_of_torch() -> str:
    asked = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run(
        [device.python(), "-c", asked], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def _outcomes(every: int) -> list[tuple[str, str, str]]:
    spec = importlib.util.spec_from_file_location(
        "operators_without_arithmetic", TESTS / "operators_without_arithmetic.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[tuple[str, str, str]] = module.outcomes(
        device.libraries(), device.python(), every, device.NAME
    )
    return found
