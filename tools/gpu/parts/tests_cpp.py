"""The C++ tests marked gpu, where they are built."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import torch
from tools.gpu.check import Check, check, skipped
from tools.gpu.runner import ROOT

SMALL_LIMIT = 5  # tests


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
    failed = 0
    for name in names[: SMALL_LIMIT if small else None]:
        done = subprocess.run(
            [found[-1], name.replace(",", "\\,")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        failed += done.returncode != 0
        yield check(name, done.returncode == 0, done.stdout[-300:] if done.returncode else "")
    yield check("C++ tests", failed == 0 and bool(names), f"{failed} failed", failed)
