"""What the probes add to `import brimful` on a machine without a driver, and what all of brimful adds to torch."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import common

IDS = ("probes.import_s",)
#: Training needs none of them; what they take in themselves is in their times.
PROBES = ("_summary", "errors", "gpus", "leaks", "loader", "monitor")
LINE = re.compile(r"import time:\s+\d+ \|\s+(\d+) \| +(\S+)")


def once() -> tuple[float, float]:
    """Returns the seconds of the probes and of all but torch, of one import, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import brimful"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    took = {name: int(us) for us, name in LINE.findall(done.stderr)}
    if "brimful" not in took:
        raise RuntimeError(f"no times were printed: {done.stderr[-500:]}")
    probes = sum(took.get(f"brimful.{name}", 0) for name in PROBES)
    return probes / 1e6, (took["brimful"] - took["torch"]) / 1e6


def measure(quick: bool) -> Iterator[common.Figure]:
    """The median of some imports."""
    times, packages = zip(*(once() for _ in range(3 if quick else 15)), strict=True)
    conditions = common.machine_conditions()
    conditions["package_s"] = {"median": statistics.median(packages), "least": min(packages)}
    yield common.Figure(
        "probes.import_s",
        "s",
        value=statistics.median(times),
        low=min(times),
        high=max(times),
        rounds=len(times),
        conditions=conditions,
    )
