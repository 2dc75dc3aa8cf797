"""The Python tests of one file that are marked gpu; those that skip are listed with their reasons."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tools.gpu.catalogue import ROOT, SMALL_TESTS, TEST_FILE
from tools.gpu.check import Check, check, skipped


def run(small: bool) -> Iterator[Check]:
    """Yields a check of the number of tests that fail, one for each of these, and one for each that skips."""
    name = os.environ[TEST_FILE]
    tests = f"tests/python/{name}"
    if small and SMALL_TESTS.get(name):
        tests += f"::{SMALL_TESTS[name]}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
        done = subprocess.run(
            [*command, f"--junitxml={file}", tests],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout)  # the last words of a part that ends early
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
    if count == len(left_out) > 0:
        yield Check("tests", "skipped", words, 0, {"count": count})
    else:
        yield check("tests", not failed and count > 0, words, len(failed), count=count)
    yield from failed
    yield from left_out
