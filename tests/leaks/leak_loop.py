"""The loop of each program of this folder, and what a finder is to say of it.

A program may state how many ``# steps: N`` it has. One under ``planted`` marks the line of its leak with
``# holder: NAME``, and states each clause of the remedy as ``# advice: WORDS``; one under ``clean`` has none. A cache
that ``# fills: NAME`` and then stops may be reported as such meanwhile, and no more when it has stopped.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import brimful

FOLDER = Path(__file__).parent
PLANTED = sorted((FOLDER / "planted").glob("*.py"))
CLEAN = sorted((FOLDER / "clean").glob("*.py"))

PLANTED_STEPS = 10  # within which a leak is to be reported
CLEAN_STEPS = 16

_running: list[tuple[brimful.LeakFinder, int]] = []


def steps() -> Iterator[int]:
    """Those of the program in run(), each watched by its finder."""
    finder, count = _running[-1]
    yield from finder.watch(range(count))


def steps_of(program: Path) -> int:
    stated = re.search(r"^# steps: (\d+)", program.read_text(), re.M)
    return int(stated[1]) if stated else CLEAN_STEPS if program in CLEAN else PLANTED_STEPS


def run(program: Path) -> list[brimful.Leak]:
    """Returns the leaks that are found in a program. This folder must be on sys.path."""
    with brimful.LeakFinder() as finder:
        _running.append((finder, steps_of(program)))
        try:
            runpy.run_path(str(program), run_name="__main__")
        finally:
            _running.pop()
    return finder.leaks


def is_right(program: Path, leaks: list[brimful.Leak]) -> bool:
    """Whether there is one leak, with the line, the holder and the advice that a planted program states."""
    text = program.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.search(r"# holder: (\S+)", line):
            place = f"{program.name}:{number}"
            return len(leaks) == 1 and all(
                (
                    found[1] in leaks[0].holder.path,
                    any(place in site for site in leaks[0].sites),
                    has_clauses(leaks[0].advice, re.findall(r"^# advice: (.+)$", text, re.M)),
                )
            )
    return not leaks


def has_clauses(advice: str, expected: list[str]) -> bool:
    clauses = advice.split("; ")
    return len(clauses) == len(expected) and all(
        words in clause for words, clause in zip(expected, clauses, strict=True)
    )
