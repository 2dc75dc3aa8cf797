"""How many of the planted leaks of tests/leaks are found with their line and holder, and alarms in its clean loops."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import common

IDS = ("probes.leaks_found", "probes.leak_alarms")
CORPUS = Path(__file__).resolve().parents[2] / "tests" / "leaks"


def measure(quick: bool) -> Iterator[common.Figure]:
    """Runs each program under a finder, in this process."""
    sys.path.insert(0, str(CORPUS))
    loop = importlib.import_module("leak_loop")
    found = {path.stem: loop.run(path) for path in loop.PLANTED}
    missed = [path.stem for path in loop.PLANTED if not loop.is_right(path, found[path.stem])]
    right = len(found) - len(missed)
    yield common.Figure(
        "probes.leaks_found",
        "count",
        value=right,
        low=right,
        high=right,
        rounds=1,
        conditions={"planted": len(found), "missed": missed},
    )
    alarms = {path.stem: [str(leak) for leak in loop.run(path)] for path in loop.CLEAN}
    raised = sum(map(len, alarms.values()))
    yield common.Figure(
        "probes.leak_alarms",
        "count",
        value=raised,
        low=raised,
        high=raised,
        rounds=1,
        conditions={"clean": len(alarms), "alarms": {k: v for k, v in alarms.items() if v}},
    )
