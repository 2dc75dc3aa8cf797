"""Figures that are numbers of failing tests: those marked gpu, the same with late streams, torch's operators."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.gpu.catalogue import BY_NAME
from tools.gpu.check import Check
from tools.gpu.parts.tests import checks_of
from tools.gpu.runner import run_part

from benchmarks import common
from benchmarks.cuda.device import ROOT, Device, count, device

IDS = ("cuda.gpu_tests_bad", "cuda.late_bad", "cuda.op_bad")
MARKED = ["--numprocesses=2", "-m", "gpu and not slow", "tests/python"]
# The parts of `make gpu` are processes with time limits, which late streams would reach.
LATE = ["--ignore=tests/python/project/test_gpu_check.py"]
OPERATORS = [
    "--numprocesses=2",
    "-m",
    "gpu and not slow",
    "tests/cuda_sim/test_sim_opinfo.py",
]
QUICK = ["-k", "fragments", "tests/python/sizer/test_cache_release.py"]
CPP = "C++: "
DELAY_US = "200"  # of each piece of a stream's work


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields each figure as its tests are done. Only the simulated device has late streams and stand-ins."""
    here = device()
    if here is None:
        yield from (common.unmeasured(name, common.NEEDS_CUDA) for name in IDS)
        return
    cpp = not quick
    yield _tests(IDS[0], here, QUICK if quick else MARKED, {}, cpp)
    if not here.simulated:
        yield from (common.unmeasured(name, common.NEEDS_SIMULATION) for name in IDS[1:])
        return
    late = {"SIM_CUDA_DELAY_US": DELAY_US}
    yield _tests(IDS[1], here, QUICK if quick else [*MARKED, *LATE], late, cpp)
    yield _tests(IDS[2], here, [*OPERATORS, *(["-k", "relu"] if quick else [])], {})


def _tests(
    figure_id: str, here: Device, what: list[str], more: dict[str, str], cpp: bool = False
) -> common.Figure:
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
    if cpp:
        rest += _cpp(here, more)
    bad = {check.name: check.words[:200] for check in rest if check.outcome in ("bad", "ended")}
    skipped = {check.name: check.words for check in rest if check.outcome == "skipped"}
    tests = int(whole.facts["count"]) + sum(check.name.startswith(CPP) for check in rest)
    found = {"tests": tests, "bad": bad, "skipped": skipped, **more}
    return count(figure_id, len(bad), here, tests, **found)


def _cpp(here: Device, more: dict[str, str]) -> list[Check]:
    """One check for each C++ test, or why there are none."""
    part = BY_NAME["tests_cpp"]
    environment = {**here.environment, **more}
    checks, _ = run_part(dataclasses.replace(part, environment=environment), False)
    return [
        dataclasses.replace(check, name=CPP + check.name)
        for check in checks
        if check.name != "C++ tests" or check.outcome == "skipped"
    ]
