"""What a GPU is asked in a quarter of an hour: tools/gpu/ask.sh OUT

1. ddp: `OUT/ddp.jsonl`, a line for each model as it is measured: brimful's wrapper beside torch's DDP and the bare
   model, a process each, in turn.
2. steps: `OUT/steps.json.gz`, the allocator's events and the operators of whole training steps (tools/gpu/steps.py).
3. checks: `make gpu`, whose results go to `OUT/checks.jsonl` and `OUT/logs`.

Each result is written when it is there. What has run to its end is left out when the command is given again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.gpu import __main__ as command, catalogue, schedule
from tools.gpu.catalogue import ROOT

QUESTIONS = ("ddp", "steps", "checks")
ROUNDS, STEPS = 30, 3  # of a race
STEP_LIMIT_S = 240  # of one case's process
DEFAULT = ""
ALLOCATORS = {DEFAULT: "default", "expandable_segments:True": "expandable_segments"}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/gpu/ask.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=QUESTIONS, help="this question")
    parser.add_argument("--minutes", type=float, help="begin nothing after them")
    parser.add_argument("--small", action="store_true", help="at the simulated device's scale")
    parser.add_argument("--wheel", type=Path, help="install this one of brimful's first")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Asks; the exit status of make gpu, or 8 where nothing could be run."""
    given = _parse(argv)
    clock = schedule.Clock(given.minutes)
    machine = command.find_machine(given.wheel)
    if isinstance(machine, str):
        print(machine)
        return command.NOTHING
    given.out.mkdir(parents=True, exist_ok=True)
    asked = given.only or QUESTIONS
    count = schedule.beside(machine.pop("free_bytes", None))
    small = given.small or bool(machine["simulated"])
    if "ddp" in asked:
        ask_ddp(given.out / "ddp.jsonl", small, clock)
    if "steps" in asked and _is_time(clock):
        ask_steps(given.out / "steps.json.gz", machine, small, count, clock)
    if "checks" in asked and _is_time(clock):
        options = ["--resume", "--out", str(given.out / "checks.jsonl"), *["--small"] * small]
        left_s = clock.left_s()
        return command.main(
            [*options, *([] if left_s is None else ["--minutes", f"{left_s / 60}"])]
        )
    return 0


def _is_time(clock: schedule.Clock) -> bool:
    left_s = clock.left_s()
    return left_s is None or left_s >= schedule.SHORTEST_S


def ask_ddp(file: Path, small: bool, clock: schedule.Clock) -> None:
    """A line for each model: times, overheads with their intervals, profiles; or the reason why there is none."""
    from tools.gpu import race, racer

    done = {json.loads(line)["case"] for line in file.open()} if file.exists() else set()
    for case in list(racer.SMALL_CASES)[:1] if small else racer.CASES:
        if case in done or not _is_time(clock):
            continue
        began = time.monotonic()
        rounds, steps = (2, 1) if small else (ROUNDS, STEPS)
        try:
            found = race.race(case, race.wrappers(), rounds, steps, small)
        except race.Ended as error:
            found = {"case": case, "reason": str(error)}
        found["seconds"] = round(time.monotonic() - began, 1)
        with file.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
        said = {name: found.get(name) for name in ("median_ms", "overhead", "reason", "seconds")}
        print(f"ddp, {case}: {json.dumps(said)}", flush=True)


def ask_steps(
    file: Path, machine: dict[str, Any], small: bool, count: int, clock: schedule.Clock
) -> None:
    """All cases with each allocator, side by side; the file is written again when one is done."""
    from tools.gpu import steps

    cases = ("MLP",) if small else tuple(steps.CASES)
    jobs = [(case, settings) for settings in ALLOCATORS for case in cases]
    kept: dict[str, Any] = _read(file) or {"machine": machine, "allocators": {}}
    jobs = [job for job in jobs if job[0] not in kept["allocators"].get(ALLOCATORS[job[1]], {})]
    with ThreadPoolExecutor(count) as pool:
        for (case, settings), found in pool.map(lambda job: _steps(*job, small, clock), jobs):
            print(f"steps, {case}, {ALLOCATORS[settings]}: {_said(found)}", flush=True)
            if isinstance(found, list):
                kept["allocators"].setdefault(ALLOCATORS[settings], {})[case] = found
                _write(file, kept)


def _steps(case: str, settings: str, small: bool, clock: schedule.Clock) -> tuple[Any, Any]:
    """The job, and its steps or the reason why there are none."""
    left_s = clock.left_s()
    if left_s is not None and left_s < schedule.SHORTEST_S:
        return (case, settings), "no time was left"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps"
        options = ["--small"] * small + ["--operators"] * (settings == DEFAULT)
        limit_s = STEP_LIMIT_S if left_s is None else min(left_s, STEP_LIMIT_S)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tools.gpu.steps", case, str(file), *options],
                cwd=ROOT,
                env={**os.environ, **catalogue.allocator(settings)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return (case, settings), f"not done in {limit_s:.0f} s"
        if done.returncode:
            return (case, settings), done.stdout[-400:]
        return (case, settings), json.loads(file.read_text())


def _said(found: Any) -> str:
    if not isinstance(found, list):
        return str(found)
    return "; ".join(f"{e['rows']} rows {e['peak_over_base'] >> 20} MiB" for e in found)


def _read(file: Path) -> Any:
    return json.loads(gzip.decompress(file.read_bytes())) if file.exists() else None


def _write(file: Path, kept: Any) -> None:
    """The same bytes for the same contents, whenever they are written."""
    text = json.dumps(kept, separators=(",", ":"))
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    sys.exit(main())
