"""`brimful report`: what recordings of memory (``memory.record``) have, as an HTML page and for other tools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from brimful import _C
from brimful.memory import Recording, load_recording

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Write what is asked for; 2 where a file is no recording or cannot be read or written, else 0."""
    parser = argparse.ArgumentParser(
        prog="brimful report",
        description="Memory over time by category and line, and what the peak was made of, as one HTML page. Several "
        "recordings are the ranks of one run.",
    )
    parser.add_argument("recordings", nargs="+", metavar="RECORDING", help="files of memory.record")
    parser.add_argument(
        "-o",
        "--output",
        metavar="HTML",
        help="where to write the page (default: report.html, if no trace or snapshot is asked for)",
    )
    parser.add_argument("--diff", action="store_true", help="compare two recordings on the page")
    parser.add_argument(
        "--perfetto", metavar="JSON", help="write a trace for ui.perfetto.dev; no page without -o"
    )
    parser.add_argument(
        "--memory-viz",
        metavar="PICKLE",
        help="write a snapshot for pytorch.org/memory_viz; no page without -o",
    )
    given = parser.parse_args(arguments)
    if given.diff and len(given.recordings) != 2:
        parser.error(f"--diff needs two recordings (given: {len(given.recordings)})")
    others = {"--perfetto": given.perfetto, "--memory-viz": given.memory_viz}
    asked = " and ".join(name for name, path in others.items() if path)
    if given.diff and asked and not given.output:
        parser.error(
            f"--diff is for a page, and none is written ({asked}: given); add -o, or leave --diff out"
        )
    try:
        for path in _write(given):
            print(path)
    except (OSError, ValueError) as error:
        print(f"brimful report: {error}", file=sys.stderr)
        return 2
    return 0


def _write(given: argparse.Namespace) -> list[str]:
    recordings = [load_recording(path) for path in given.recordings]
    page = given.output
    if not (page or given.perfetto or given.memory_viz):
        page = "report.html"
    if page and given.diff:
        before, after = recordings
        _C._write_memory_difference(before, after, page)
    elif page:
        _C._write_memory_report(_by_rank(recordings), page)
    if given.perfetto:
        _C._write_memory_trace(recordings, given.perfetto)
    if given.memory_viz:
        _C._write_memory_viz(recordings, given.memory_viz)
    return [path for path in (page, given.perfetto, given.memory_viz) if path]


def _by_rank(recordings: list[Recording]) -> list[Recording]:
    recordings = sorted(recordings, key=lambda recording: recording.rank)
    ranks = [recording.rank for recording in recordings]
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise ValueError(
                f"two recordings are of one rank (rank: {rank}); compare two runs with --diff"
            )
    return recordings
