"""``brimful top``: the host, the GPUs and who is on them, or a job's ranks, as a table that renews itself."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from brimful import _C

__all__ = ["main"]

_CLEAR = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str]) -> int:
    """Show until interrupted, or once; returns the exit status."""
    parser = argparse.ArgumentParser(prog="brimful top", description=__doc__)
    parser.add_argument("--once", action="store_true", help="show once and end")
    parser.add_argument("--json", action="store_true", help="one JSON line each time")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between two looks (default: 1)",
    )
    parser.add_argument("--pid", type=int, help="show this process and what it started, too")
    parser.add_argument(
        "--job",
        type=Path,
        metavar="FOLDER",
        help="show the ranks of a job instead, from the files of brimful.metrics.JsonLines(FOLDER)",
    )
    parser.add_argument(
        "--silent",
        type=float,
        metavar="S",
        help="with --job: seconds without a sample after which a rank is marked SILENT (default: 10, or ten steps "
        "where these take longer)",
    )
    given = parser.parse_args(arguments)
    if not given.interval > 0:
        parser.error(f"the interval must be positive (interval: {given.interval})")
    if given.pid is not None and given.pid < 1:
        parser.error(f"a pid is positive (pid: {given.pid})")
    if given.job is not None and not given.job.is_dir():
        parser.error(f"there is no such folder (job: {given.job})")
    look = _look_at_host(given) if given.job is None else _look_at_job(given)
    live = not given.once and not given.json and sys.stdout.isatty()
    try:
        while True:
            text = look()
            sys.stdout.write(_CLEAR + text if live else text)
            sys.stdout.flush()
            if given.once:
                return 0
            time.sleep(given.interval)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _look_at_host(given: argparse.Namespace) -> Callable[[], str]:
    pid = -1 if given.pid is None else given.pid
    if given.json:
        return lambda: _C._sample_json(pid) + "\n"
    return lambda: _C._sample_table(pid)


def _look_at_job(given: argparse.Namespace) -> Callable[[], str]:
    from brimful.cli._job import job_text

    return lambda: job_text(given.job, given.json, given.silent)
