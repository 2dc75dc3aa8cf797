"""The C++ tests marked gpu, where they are built."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tools.gpu.catalogue import ROOT
from tools.gpu.check import Check, check, skipped

SMALL_LIMIT = 5  # tests
BESIDE = 4  # processes side by side


def run(small: bool) -> Iterator[Check]:
    """A test is a process of its own, as under CTest."""
    folders = f"build/torch-{'.'.join(torch.__version__.split('.')[:2])}-*"
    found = sorted(ROOT.glob(f"{folders}/tests/cpp/brimful_tests"))
    if not found:
        yield skipped("C++ tests", f"not built ({folders}/tests/cpp/brimful_tests; make build)")
        return
    listed = subprocess.run(
        [found[-1], "[gpu]", "--list-test-names-only"], stdout=subprocess.PIPE, text=True
    )
    names = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    names = names[: SMALL_LIMIT if small else None]
    with ThreadPoolExecutor(BESIDE) as pool:
        checks = list(pool.map(lambda name: _test(found[-1], name), names))
    yield from checks
    failed = sum(found.outcome == "bad" for found in checks)
    yield check("C++ tests", failed == 0 and bool(names), f"{failed} failed", failed)


def _test(program: Path, name: str) -> Check:
    done = subprocess.run(
        [program, name.replace(",", "\\,")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return check(name, done.returncode == 0, done.stdout[-300:] if done.returncode else "")
