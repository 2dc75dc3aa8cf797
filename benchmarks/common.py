"""What every benchmark shares: a figure, the list of ids, the machine, the printed table."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch

from benchmarks.intervals import Interval

MAX_REASON = 1000  # characters; some errors print tensors
IDS_FILE = Path(__file__).parent / "ids.json"
UNITS = ("ratio", "fraction", "count", "bytes", "MB", "s")
BETTER = ("lower", "higher")
NEEDS_CUDA = "needs a CUDA device"
NEEDS_SIMULATION = "needs the simulated CUDA device, where there is no GPU"
NO_FAILURE = (NEEDS_CUDA, NEEDS_SIMULATION)  # reasons for which a figure may be missing
# Below this difference a ratio of times, or a fraction, is judged by CPU time where it is known, over
# at least this many rounds.
CLOSE_FRACTION = 0.05
CLOSE_MIN_ROUNDS = 30


@dataclass
class Figure:
    """One measured number. `value` is None where it could not be measured; `reason` says why."""

    id: str
    unit: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    peer: str | None = None
    rounds: int = 0
    conditions: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None

    def line(self, quick: bool) -> dict[str, Any]:
        """Returns the JSON line's object."""
        line: dict[str, Any] = {
            "id": self.id,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "unit": self.unit,
            "peer": self.peer,
            "rounds": self.rounds,
            "quick": quick,
            "torch": torch.__version__,
            "cpu": cpu_name(),
            "conditions": self.conditions,
        }
        if self.reason is not None:
            line["reason"] = self.reason
        return line


@dataclass(frozen=True)
class Id:
    """An entry of ids.json. `target` is None for a figure that is only reported."""

    unit: str
    better: str
    target: float | None


def load_ids(path: Path = IDS_FILE) -> dict[str, Id]:
    """Reads ids.json. Raises ValueError for an entry of the wrong form."""
    ids = {}
    for name, entry in json.loads(path.read_text()).items():
        if "." not in name or set(entry) != {"unit", "better", "target"}:
            raise ValueError(f"an id needs a subsystem, unit, better and target (id: {name})")
        if entry["unit"] not in UNITS:
            raise ValueError(f"unknown unit (id: {name}, unit: {entry['unit']})")
        if entry["better"] not in BETTER:
            raise ValueError(f"unknown direction (id: {name}, better: {entry['better']})")
        target = entry["target"]
        is_number = isinstance(target, (int, float)) and not isinstance(target, bool)
        if target is not None and not is_number:
            raise ValueError(f"a target is a number or null (id: {name}, target: {target})")
        ids[name] = Id(**entry)
    return ids


def unmeasured(figure_id: str, reason: str, **known: Any) -> Figure:
    """Returns the figure of something that could not be measured."""
    return Figure(
        figure_id, load_ids()[figure_id].unit, reason=textwrap.shorten(reason, MAX_REASON), **known
    )


def check_figure(figure: Figure, ids: dict[str, Id]) -> None:
    """Raises ValueError where a figure contradicts ids.json or itself."""
    where = f"(id: {figure.id})"
    if figure.id not in ids:
        raise ValueError(f"the id is not in ids.json {where}")
    if figure.unit != ids[figure.id].unit:
        raise ValueError(f"the unit differs from ids.json {where}")
    numbers = (figure.low, figure.value, figure.high)
    if figure.value is None:
        if not figure.reason:
            raise ValueError(f"a figure without a value needs a reason {where}")
        if figure.low is not None or figure.high is not None:
            raise ValueError(f"a figure without a value has no interval {where}")
        return
    if figure.reason is not None:
        raise ValueError(f"a figure with a value has no reason {where}")
    if any(number is None or not math.isfinite(number) for number in numbers):
        raise ValueError(f"value, low and high must be finite numbers {where}")
    low, value, high = (float(number) for number in numbers if number is not None)
    if not low <= value <= high:
        raise ValueError(f"the value is outside its interval (id: {figure.id}, {low, value, high})")
    if figure.rounds < 1:
        raise ValueError(f"a measured figure has at least one round {where}")
    if figure.unit == "ratio" and figure.peer is None:
        raise ValueError(f"a ratio needs its peer {where}")


def write_line(file: TextIO, figure: Figure, quick: bool) -> None:
    """Appends one JSON line and flushes it, so that an interrupted run keeps what it has."""
    file.write(json.dumps(figure.line(quick), allow_nan=False) + "\n")
    file.flush()


def verdict(figure: Figure, entry: Id) -> str:
    """Returns `pass`, `miss`, `reported` or `not measured`, and how it was judged."""
    if figure.value is None:
        return "not measured"
    if entry.target is None:
        return "reported"
    value, low, high, note = figure.value, figure.low, figure.high, ""
    cpu = figure.conditions.get("cpu_time")
    even = {"ratio": 1, "fraction": 0}.get(entry.unit)
    if even is not None and cpu is not None and abs(value - even) < CLOSE_FRACTION:
        if figure.rounds < CLOSE_MIN_ROUNDS:
            return f"open: within {CLOSE_FRACTION:.0%}, needs >= {CLOSE_MIN_ROUNDS} rounds"
        value, low, high = cpu["value"], cpu["low"], cpu["high"]
        note = f" by CPU time {value:.3f} [{low:.3f}, {high:.3f}]"
    reached = value <= entry.target if entry.better == "lower" else value >= entry.target
    if low is not None and high is not None and low < high and low <= entry.target <= high:
        note += ", interval spans the target"
    return ("pass" if reached else "miss") + note


def format_table(figures: list[Figure], ids: dict[str, Id]) -> str:
    """Returns the table that run.py prints at its end."""
    rows: list[tuple[str, ...]] = [
        ("id", "value", "95 % interval", "unit", "target", "peer", "rounds", "verdict")
    ]
    for figure in figures:
        entry = ids[figure.id]
        sign = "<=" if entry.better == "lower" else ">="
        rows.append(
            (
                figure.id,
                "-" if figure.value is None else f"{figure.value:.4g}",
                "-" if figure.low is None else f"{figure.low:.4g} .. {figure.high:.4g}",
                figure.unit,
                "-" if entry.target is None else f"{sign} {entry.target:g}",
                figure.peer or "-",
                str(figure.rounds),
                verdict(figure, entry),
            )
        )
    lines = [format_row(row, rows) for row in rows]
    lines += [f"  {figure.id}: {figure.reason}" for figure in figures if figure.reason]
    return "\n".join(lines)


def format_row(row: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns one row, its columns as wide as the widest of `rows`."""
    widths = [max(len(other[k]) for other in rows) for k in range(len(row))]
    return "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def interval_dict(interval: Interval) -> dict[str, float]:
    """Returns an interval as it is written in `conditions`."""
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def collect_all() -> None:
    """Collects garbage until there is none: a cycle through autograd graphs comes apart a node at a time.

    torch's MemTracker leaves such ones behind.
    """
    for _ in range(100):
        if gc.collect() == 0:
            return


def cpu_name() -> str:
    """Returns the CPU's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_conditions() -> dict[str, Any]:
    """Returns what a reader needs to know of the machine: cores allowed, its load, Python."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "threads_per_rank": 1,
    }


def figures_of(modules: Sequence[ModuleType], quick: bool, only: Sequence[str]) -> Iterator[Figure]:
    """Measures each of the modules' figures, or those named in `only`, on one thread; yields it when it is ready."""
    torch.set_num_threads(1)
    for module in modules:
        if not only or not set(only).isdisjoint(module.IDS):
            for figure in module.measure(quick):
                if not only or figure.id in only:
                    yield figure
