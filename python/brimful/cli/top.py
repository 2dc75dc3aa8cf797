"""``brimful top``: the host, the GPUs and who is on them, as a table that renews itself."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from brimful import _C

__all__ = ["main"]

_CLEAR = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str]) -> int:
    """Show until interrupted, or once; returns the exit status."""
    parser = argparse.ArgumentParser(prog="brimful top", description=__doc__)
    parser.add_argument("--once", action="store_true", help="show once and end")
    parser.add_argument("--json", action="store_true", help="one JSON line each time")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds (1)")
    parser.add_argument("--pid", type=int, help="show this process and what it started, too")
    given = parser.parse_args(arguments)
    if not given.interval > 0:
        parser.error(f"the interval must be positive (interval: {given.interval})")
    if given.pid is not None and given.pid < 1:
        parser.error(f"a pid is positive (pid: {given.pid})")
    pid = -1 if given.pid is None else given.pid
    live = not given.once and not given.json and sys.stdout.isatty()
    try:
        while True:
            text = _C._sample_json(pid) + "\n" if given.json else _C._sample_table(pid)
            sys.stdout.write(_CLEAR + text if live else text)
            sys.stdout.flush()
            if given.once:
                return 0
            time.sleep(given.interval)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
