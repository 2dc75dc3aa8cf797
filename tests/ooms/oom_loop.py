"""Runs the programs of this folder until their memory runs out, and knows what a report is to say of it.

A program marks the line that is to blame with ``# cause: NAME``, or ``# cause: NAME, here`` if the line is to be named.
It may state words of the cause's text (``# says: WORDS``), of its advice (``# advice: WORDS``), words that are nowhere
in the advice (``# not: WORDS``), and the ``# phase: NAME`` of the refusal.
"""

from __future__ import annotations

import gc
import re
import runpy
from pathlib import Path

import torch

import brimful

PLANTED = sorted((Path(__file__).parent / "planted").glob("*.py"))


def allow(mib: float) -> None:
    """From here on, so much more than is in use."""
    brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes + int(mib * (1 << 20)))


def run(program: Path) -> brimful.memory.OomReport:
    """Returns the report of the error in which a program ends. This folder must be on sys.path."""
    gc.collect()
    before = brimful.memory.stats("cpu").limit_bytes
    try:
        with brimful.memory.track():
            runpy.run_path(str(program), run_name="__main__")
    except torch.OutOfMemoryError:
        report = brimful.memory.last_oom()
        assert report is not None
        return report
    finally:
        brimful.memory.set_limit("cpu", before)
        gc.collect()
    raise AssertionError(f"{program.name} did not run out of memory")


def is_right(program: Path, report: brimful.memory.OomReport) -> bool:
    """Whether the first cause is the planted one, and names its line where that is asked for."""
    first = report.findings[0]
    for number, line in enumerate(program.read_text().splitlines(), 1):
        if found := re.search(r"# cause: (\w+)(, here)?", line):
            place = f"{program.name}:{number}"
            named = first.cause == found[1] and (not found[2] or place in first.text)
            return named and has_what_is_stated(program.read_text(), report)
    raise AssertionError(f"{program.name} names no cause")


def has_what_is_stated(text: str, report: brimful.memory.OomReport) -> bool:
    first = report.findings[0]
    expected = {
        "says": lambda words: words in first.text,
        "advice": lambda words: words in first.advice,
        "not": lambda words: words not in first.advice,
        "phase": lambda words: words == report.phase,
    }
    stated = re.findall(r"^# (says|advice|not|phase): (.+)$", text, re.M)
    return all(expected[kind](words) for kind, words in stated)
