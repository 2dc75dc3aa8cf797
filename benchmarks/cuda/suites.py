"""Figures that are numbers of failing tests: those marked gpu, the same with late streams, torch's operators."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.gpu.parts.tests import checks_of

from benchmarks import common
from benchmarks.cuda.device import ROOT, Device, count, device

IDS = ("cuda.gpu_tests_bad", "cuda.late_bad", "cuda.op_bad")
MARKED = ["--numprocesses=2", "-m", "gpu and not slow", "tests/python"]
# The parts of `make gpu` are processes with time limits, which late streams would reach.
LATE = ["--ignore=tests/python/test_gpu_check.py"]
OPERATORS = [
    "--numprocesses=2",
    "-m",
    "gpu and not slow",
    "tests/cuda_sim/tests/test_sim_opinfo.py",
]
QUICK = ["-k", "fragments", "tests/python/test_cache_release.py"]
DELAY_US = "200"  # of each piece of a stream's work


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields each figure as its tests are done. Only the simulated device has late streams and stand-ins."""
    here = device()
    if here is None:
        yield from (common.unmeasured(name, common.NEEDS_CUDA) for name in IDS)
        return
    yield _tests(IDS[0], here, QUICK if quick else MARKED, {})
    if not here.simulated:
        why = "a simulated device's: a GPU has its own streams and kernels"
        yield from (common.unmeasured(name, why) for name in IDS[1:])
        return
    yield _tests(
        IDS[1], here, QUICK if quick else [*MARKED, *LATE], {"SIM_CUDA_DELAY_US": DELAY_US}
    )
    yield _tests(IDS[2], here, [*OPERATORS, *(["-k", "relu"] if quick else [])], {})


def _tests(figure_id: str, here: Device, what: list[str], more: dict[str, str]) -> common.Figure:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={file}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *what],
            cwd=ROOT,
            env={**os.environ, **here.environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        checks = list(checks_of(file)) if file.exists() else []
    if not checks or not checks[0].facts["count"] or checks[0].value is None:
        return common.unmeasured(figure_id, f"pytest did not run: {done.stdout[-400:]}")
    whole, *rest = checks
    bad = {check.name: check.words[:200] for check in rest if check.outcome == "bad"}
    skipped = {check.name: check.words for check in rest if check.outcome == "skipped"}
    found = {"tests": whole.facts["count"], "bad": bad, "skipped": skipped, **more}
    return count(figure_id, len(bad), here, int(whole.facts["count"]), **found)
