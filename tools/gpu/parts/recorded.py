"""Torch's statistics after each event of the programs, against those that were recorded on the simulated device."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from tools.gpu import programs
from tools.gpu.check import Check, check
from tools.gpu.record import FILE


def run(small: bool) -> Iterator[Check]:
    """Yields a check for each program: the first events that differ."""
    recorded = json.loads(FILE.read_text())
    columns = recorded["columns"][1:]
    torch.cuda.init()
    for name in programs.PROGRAMS:
        different = []
        expected = [
            (event, dict(zip(columns, row, strict=True)))
            for event, *row in recorded["programs"][name]
        ]
        found = programs.events(name)
        for (event, there), (_, here) in zip(expected, found, strict=False):
            off = [
                f"{key} {here[key]} instead of {there[key]}"
                for key in here
                if here[key] != there[key]
            ]
            if off:
                different.append(f"{event}: {', '.join(off)}")
        if len(found) != len(expected):
            different.append(f"{len(found)} events instead of {len(expected)}")
        words = f"{len(different)} of {len(expected)} events differ"
        words += f" (recorded with torch {recorded['torch']}); first: " if different else ""
        yield check(name, not different, words + "; ".join(different[:3]), len(different))
