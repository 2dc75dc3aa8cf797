"""Instruction counts by valgrind's callgrind: they do not depend on what else the machine does."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

# The programs call what is to be counted through this function; see reducer/instructions.cpp.
COUNTED = "brimful_bench_step"
ROOT = Path(__file__).resolve().parent.parent
CONTROL_S = 60.0
TIMEOUT_S = 3600.0  # a transformer needs ten minutes of an idle core


class Unavailable(Exception):
    """Nothing could be counted here; the message says what is missing."""


def find_program(name: str) -> Path:
    """Returns a program of benchmarks/CMakeLists.txt, from the build of the brimful that is imported.

    Raises Unavailable.
    """
    spec = importlib.util.find_spec("brimful")
    if spec is None or spec.origin is None:
        raise Unavailable("brimful cannot be imported; build it first")
    program = Path(spec.origin).parents[2] / "benchmarks" / name
    if not program.exists():
        raise Unavailable(f"{program} was not built; configure with -DBRIMFUL_BENCHMARKS=ON")
    return program


def profile(program: Path, *arguments: str, late: bool = False) -> str:
    """Runs a program under callgrind; returns the profile's text. Raises Unavailable.

    `late`: the program calls `start_counting` by itself, and what it does before is several times faster.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise Unavailable("valgrind is not installed")
    with tempfile.TemporaryDirectory(prefix="brimful-bench-") as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            valgrind,
            "--tool=callgrind",
            "--collect-atstart=no",
            f"--instr-atstart={'no' if late else 'yes'}",
            f"--toggle-collect={COUNTED}",
            "--compress-strings=no",
            "--compress-pos=no",
            "--dump-line=no",
            f"--callgrind-out-file={out}",
            str(program),
            *arguments,
        ]
        run(command, "callgrind", TIMEOUT_S, makes=out)
        return out.read_text()


def start_counting() -> None:
    """Within a program that `profile` runs with `late`. Raises Unavailable."""
    run(["callgrind_control", "-i", "on", str(os.getpid())], "callgrind_control", CONTROL_S)


def run(command: Sequence[str], name: str, timeout_s: float, makes: Path | None = None) -> str:
    """Runs a command in one thread, from the project's folder; returns what it prints.

    Raises Unavailable, also if it does not make the file.
    """
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{name} took longer than {timeout_s:g} s") from None
    if done.returncode != 0 or (makes is not None and not makes.exists()):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Unavailable(f"{name} ended with exit status {done.returncode}: {last}")
    return done.stdout


def total(text: str) -> int:
    """Returns the instructions that were counted in all. Raises ValueError for no profile."""
    found = re.search(r"^summary: (\d+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError("no summary in the profile")
    return int(found[1])


def inclusive(text: str, names: Sequence[str]) -> int:
    """Returns the instructions of the functions whose names begin so, with all that they called.

    A call from one of them to another is part of the first and not counted again.
    """
    caller = callee = ""
    cost, is_cost_of_call = 0, False
    prefixes = tuple(names)
    for line in text.splitlines():
        if is_cost_of_call:
            is_cost_of_call = False
            if callee.startswith(prefixes) and not caller.startswith(prefixes):
                cost += int(line.split()[-1])
        elif line.startswith("fn="):
            caller = line[3:]
        elif line.startswith("cfn="):
            callee = line[4:]
        elif line.startswith("calls="):
            is_cost_of_call = True
    return cost
