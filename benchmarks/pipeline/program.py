"""Runs the C++ program of the pipeline's benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from benchmarks import callgrind

PROGRAM = "brimful_bench_pipeline"
TIMEOUT_S = 300.0

Unavailable = callgrind.Unavailable


def run(*arguments: object) -> list[dict[str, Any]]:
    """Returns the lines that it prints. Raises Unavailable."""
    program = callgrind.find_program(PROGRAM)
    try:
        done = subprocess.run(
            [str(program), *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{PROGRAM} {arguments[0]} took longer than {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Unavailable(
            f"{PROGRAM} {arguments[0]} ended with exit status {done.returncode}: {last}"
        )
    return [json.loads(line) for line in done.stdout.splitlines()]
