"""Five minutes on a machine with a GPU: what has only run on a simulated device is run on a real one.

Each part is a process of its own with a time limit. Parts run side by side, and those that time something or fill the
device run alone after them. The exit status is a sum: 1 where a check is bad, 4 where a part ended before it was done,
8 where nothing could be run, 16 where parts are left for --resume.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu import catalogue, install, schedule
from tools.gpu.catalogue import ROOT
from tools.gpu.results import Results, table

BAD, ENDED, NOTHING, LEFT = 1, 4, 8, 16


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in catalogue.parts()]
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--list", action="store_true", help="the parts, and nothing else")
    parser.add_argument(
        "--part", action="append", default=[], choices=names, metavar="PART", help="this part"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what has run to its end")
    parser.add_argument(
        "--minutes", type=float, help="begin nothing after them, and end what runs then"
    )
    parser.add_argument("--beside", type=int, help="so many parts side by side (as many as fit)")
    parser.add_argument("--small", action="store_true", help="at the simulated device's scale")
    parser.add_argument("--wheel", type=Path, help="install this one of brimful's first")
    parser.add_argument("--install", action="store_true", help="install brimful again, from here")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "checks.jsonl")
    return parser.parse_args(argv)


def find_machine(wheel: Path | None = None, again: bool = False) -> dict[str, Any] | str:
    """brimful, torch and the device, or why there is nothing to run."""
    install.use_site()
    if (wheel or again or not install.machine()) and (said := install.install(wheel)):
        return f"brimful cannot be imported, installed or built here:\n{said}"
    found: dict[str, Any] = json.loads(install.machine() or "{}")
    return found if found.get("device") else f"no CUDA device is found (machine: {found})"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; the exit status."""
    given = _parse(argv)
    if given.list:
        print("\n".join(_line(part) for part in catalogue.parts()))
        return 0
    clock = schedule.Clock(given.minutes)
    machine = find_machine(given.wheel, given.install)
    if isinstance(machine, str):
        print(machine)
        return NOTHING
    print(", ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    free_bytes = machine.pop("free_bytes", None)
    small = given.small or bool(machine["simulated"])
    parts = catalogue.parts(small)
    if given.part:
        parts = [part for part in catalogue.parts() if part.name in given.part]
    results = Results(given.out, machine, given.resume or bool(given.part))
    if given.resume:
        parts = [part for part in parts if part.name not in results.parts]
    count = given.beside or schedule.beside(free_bytes)
    ways = schedule.Ways(count, small, given.out.parent / "logs")
    left = _run(parts, results, ways, clock)
    print("\n" + table(results.parts))
    if left:
        print(f"left for --resume: {', '.join(left)}")
    return _status([entry["outcome"] for entry in results.parts.values()], bool(left))


def _line(part: catalogue.Part) -> str:
    alone = "alone" if part.alone else ""
    return f"{part.name:36}{part.limit_s:>4.0f} s  {alone:7}{part.what}"


def _run(
    parts: Sequence[catalogue.Part],
    results: Results,
    ways: schedule.Ways,
    clock: schedule.Clock,
) -> list[str]:
    """Runs what there is time for; the names of what is left."""
    left = []
    for done in schedule.run(parts, ways, clock):
        if done.checks is None:
            left.append(done.part.name)
            continue
        outcome = results.add(done.part.name, done.checks, done.seconds)
        print(f"{done.part.name}: {outcome} in {done.seconds:.1f} s", flush=True)
        for found in done.checks:
            print(f"  {found.outcome:8} {found.name}  {found.words}", flush=True)
    return [part.name for part in parts if part.name in left]


def _status(outcomes: Sequence[str], is_left: bool) -> int:
    """What the exit status says."""
    return BAD * ("bad" in outcomes) + ENDED * ("ended" in outcomes) + LEFT * is_left


if __name__ == "__main__":
    sys.exit(main())
