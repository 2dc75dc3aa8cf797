"""Ten minutes on a machine with a GPU: what has only run on a simulated device is run on a real one.

Each part is a process of its own with a time limit. The exit status is a sum: 1 where a check is bad, 4 where a part
ended before it was done, 8 where nothing could be run, 16 where parts are left for --resume.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.gpu import install
from tools.gpu.catalogue import BY_NAME, PARTS, Part
from tools.gpu.results import Results, table
from tools.gpu.runner import ROOT, run_part

BAD, ENDED, NOTHING, LEFT = 1, 4, 8, 16
SHORTEST_S = 20  # for which a part is begun


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--list", action="store_true", help="the parts, and nothing else")
    parser.add_argument("--part", action="append", default=[], choices=BY_NAME, help="this part")
    parser.add_argument("--resume", action="store_true", help="leave out what has run to its end")
    parser.add_argument("--minutes", type=float, help="begin nothing that would take longer")
    parser.add_argument("--small", action="store_true", help="at the simulated device's scale")
    parser.add_argument("--wheel", type=Path, help="install this one of brimful's first")
    parser.add_argument("--install", action="store_true", help="install brimful again, from here")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "checks.jsonl")
    return parser.parse_args(argv)


def _machine(wheel: Path | None, again: bool) -> dict[str, object] | str:
    """brimful, torch and the device, or why there is nothing to run."""
    install.use_site()
    if (wheel or again or not install.machine()) and (said := install.install(wheel)):
        return f"brimful cannot be imported, installed or built here:\n{said}"
    found: dict[str, object] = json.loads(install.machine() or "{}")
    return found if found.get("device") else f"no CUDA device is found (machine: {found})"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; the exit status."""
    given = _parse(argv)
    if given.list:
        print("\n".join(f"{part.name:16}{part.limit_s:>4.0f} s  {part.what}" for part in PARTS))
        return 0
    began = time.monotonic()
    machine = _machine(given.wheel, given.install)
    if isinstance(machine, str):
        print(machine)
        return NOTHING
    print(", ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    results = Results(given.out, machine, given.resume or bool(given.part))
    wanted = [BY_NAME[name] for name in given.part] or PARTS
    if given.resume:
        wanted = [part for part in wanted if part.name not in results.parts]
    left = _run(wanted, results, given, machine, began)
    print("\n" + table(results.parts))
    if left:
        print(f"left for --resume: {', '.join(part.name for part in left)}")
    return _status([entry["outcome"] for entry in results.parts.values()], bool(left))


def _run(
    wanted: Sequence[Part],
    results: Results,
    given: argparse.Namespace,
    machine: dict[str, object],
    began: float,
) -> list[Part]:
    """Runs what there is time for; the parts that are left."""
    small = given.small or bool(machine["simulated"])
    for k, part in enumerate(wanted):
        seconds_left = None
        if given.minutes:
            seconds_left = 60 * given.minutes - (time.monotonic() - began)
            if seconds_left < SHORTEST_S:
                return list(wanted[k:])
        checks, seconds = run_part(part, small, seconds_left)
        cut = seconds_left is not None and seconds >= seconds_left
        if cut and seconds_left is not None and seconds_left < part.limit_s:
            return list(wanted[k:])
        outcome = results.add(part.name, checks, seconds)
        print(f"{part.name}: {outcome} in {seconds:.1f} s", flush=True)
        for found in checks:
            print(f"  {found.outcome:8} {found.name}  {found.words}", flush=True)
    return []


def _status(outcomes: Sequence[str], is_left: bool) -> int:
    """What the exit status says."""
    return BAD * ("bad" in outcomes) + ENDED * ("ended" in outcomes) + LEFT * is_left


if __name__ == "__main__":
    sys.exit(main())
