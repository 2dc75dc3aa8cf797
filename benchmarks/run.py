"""Runs the benchmarks: `python benchmarks/run.py [subsystem ...] [--quick] --json FILE`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
# As a script, sys.path starts with this folder, where our module names could shadow others.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "benchmarks")]

from benchmarks import common  # noqa: E402

SUBSYSTEMS = (
    "reducer",
    "agree",
    "sizer",
    "rows",
    "ladder",
    "fleet",
    "sharded",
    "pipeline",
    "probes",
    "cuda",
    "device_model",
)
PREFIXES = {"device_model": "device"}  # of ids; else it is the folder's name


def prefix_of(subsystem: str) -> str:
    """Returns what the ids of a subsystem begin with, before the dot."""
    return PREFIXES.get(subsystem, subsystem)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where something asked for could not be measured, for want of a device apart."""
    arguments = _parse(argv)
    ids = common.load_ids()
    unknown = [figure_id for figure_id in arguments.only if figure_id not in ids]
    if unknown:
        print(f"no such figure (only: {', '.join(unknown)}); see benchmarks/ids.json")
        return 1
    failed = False
    measured: list[common.Figure] = []
    with _open(arguments.json) as file:
        for subsystem in _subsystems(arguments):
            if not _has_benchmarks(subsystem):
                print(f"{subsystem} has no benchmarks yet: nothing measured")
                failed |= subsystem in arguments.subsystems
                continue
            for figure in _run(subsystem, arguments, ids):
                common.check_figure(figure, ids)
                measured.append(figure)
                if file is not None:
                    common.write_line(file, figure, arguments.quick)
    if measured:
        print("\n" + common.format_table(measured, ids))
    if arguments.quick:
        print("quick: few rounds, to see that it runs; not to be quoted")
    unmeasured = [figure for figure in measured if figure.value is None]
    return int(failed or any(figure.reason not in common.NO_FAILURE for figure in unmeasured))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    parser.add_argument(
        "subsystems", nargs="*", metavar="subsystem", help=f"of {', '.join(SUBSYSTEMS)}; all"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="one JSON line a figure")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="this figure")
    # For the harness's own tests: what stands in our place, and the watchdog's patience.
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    parser.add_argument("--stall-s", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for subsystem in arguments.subsystems:
        if subsystem not in SUBSYSTEMS:
            parser.error(f"unknown subsystem: {subsystem} (one of {', '.join(SUBSYSTEMS)})")
    return arguments


def _subsystems(arguments: argparse.Namespace) -> list[str]:
    if arguments.subsystems:
        return list(dict.fromkeys(arguments.subsystems))
    wanted = {figure_id.split(".")[0] for figure_id in arguments.only}
    return [name for name in SUBSYSTEMS if not wanted or prefix_of(name) in wanted]


def _has_benchmarks(subsystem: str) -> bool:
    return (ROOT / "benchmarks" / subsystem / "bench.py").exists()


def _open(path: Path | None) -> contextlib.AbstractContextManager[TextIO | None]:
    return contextlib.nullcontext() if path is None else path.open("w")


def _run(
    subsystem: str, arguments: argparse.Namespace, ids: dict[str, common.Id]
) -> Iterator[common.Figure]:
    """Yields a figure for every id of the subsystem, whatever happens."""
    missing = [name for name in ids if name.split(".")[0] == prefix_of(subsystem)]
    if arguments.only:
        missing = [name for name in missing if name in arguments.only]
    seam: dict[str, Any] = {"ours": arguments.ours, "stall_s": arguments.stall_s}
    given = {name: value for name, value in seam.items() if value is not None}
    why = "its benchmark yielded no figure"
    try:
        bench = importlib.import_module(f"benchmarks.{subsystem}.bench")
        for figure in bench.figures(arguments.quick, only=arguments.only, **given):
            missing = [name for name in missing if name != figure.id]
            yield figure
    except Exception as error:
        why = f"the benchmark failed: {type(error).__name__}: {error}"
    for name in missing:
        yield common.unmeasured(name, why)


if __name__ == "__main__":
    sys.exit(main())
