"""Runs the C++ program of the pipeline's benchmarks."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import callgrind

PROGRAM = "brimful_bench_pipeline"
TIMEOUT_S = 300.0

Unavailable = callgrind.Unavailable


def run(*arguments: object) -> list[dict[str, Any]]:
    """Returns the lines that it prints. Raises Unavailable."""
    program = callgrind.find_program(PROGRAM)
    command = [str(program), *map(str, arguments)]
    out = callgrind.run(command, f"{PROGRAM} {arguments[0]}", TIMEOUT_S)
    return [json.loads(line) for line in out.splitlines()]
