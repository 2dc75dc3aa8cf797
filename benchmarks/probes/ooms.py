"""How many of the planted out-of-memory errors of tests/ooms are explained by their cause."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import common

IDS = ("probes.oom_causes",)
CORPUS = Path(__file__).resolve().parents[2] / "tests" / "ooms"


def measure(quick: bool) -> Iterator[common.Figure]:
    """Runs each program within its limit, in this process."""
    sys.path.insert(0, str(CORPUS))
    loop = importlib.import_module("oom_loop")
    wrong = [path.stem for path in loop.PLANTED if not loop.is_right(path, loop.run(path))]
    right = len(loop.PLANTED) - len(wrong)
    yield common.Figure(
        "probes.oom_causes",
        "count",
        value=right,
        low=right,
        high=right,
        rounds=1,
        conditions={"planted": len(loop.PLANTED), "wrong": wrong},
    )
