"""The Python tests of one folder that are marked gpu; those that skip are listed with their reasons."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tools.gpu.catalogue import TESTS
from tools.gpu.check import Check, check, skipped
from tools.gpu.runner import ROOT

SMALL = {  # some of each
    "faults": "test_cuda_lost.py::test_a_step_on_a_lost_device_raises_its_error",
    "fleet": "test_fleet_nccl.py::test_a_fleet_of_one_trains",
    "launch": "test_checkpoint.py::test_tensors_of_any_gpu_go_to_the_ranks_own",
    "memory": "test_live_categories.py::test_cuda_adds_up_to_torchs_peak",
    "pipeline": "test_pipeline_cuda.py::test_a_step_runs_on_the_callers_stream",
    "probes": "test_leaks.py::test_a_leak_on_a_gpu_is_found_with_its_line_and_its_holder[kept_losses]",
    "reducer": "test_device_times.py::test_buckets_end_as_the_devices_end_them",
    "search": "test_search.py::test_the_trial_keeps_to_its_fraction_of_a_gpu",
    "sizer": "test_cache_release.py",
}


def run(small: bool) -> Iterator[Check]:
    """Yields a check of the number of tests that fail, one for each of these, and one for each that skips."""
    name = os.environ[TESTS]
    tests = f"tests/python/{name}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
        done = subprocess.run(
            [*command, f"--junitxml={file}", f"{tests}/{SMALL[name]}" if small else tests],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not file.exists():
            yield Check("tests", "bad", f"pytest did not run: {done.stdout[-500:]}")
            return
        yield from checks_of(file)


def checks_of(file: Path) -> Iterator[Check]:
    """The checks that pytest's file of results says."""
    failed, left_out, count = [], [], 0
    for case in ElementTree.parse(file).iter("testcase"):
        count += 1
        name = f"{case.get('classname')}.{case.get('name')}"
        for kind in ("failure", "error"):
            failed += [Check(name, "bad", str(e.get("message"))[:300]) for e in case.iter(kind)]
        left_out += [skipped(name, str(e.get("message"))) for e in case.iter("skipped")]
    words = f"{len(failed)} of {count} tests failed, {len(left_out)} skipped"
    yield check("tests", not failed and count > len(left_out), words, len(failed), count=count)
    yield from failed
    yield from left_out
