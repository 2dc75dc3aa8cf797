"""The ranks of a job as a table, from the files of ``brimful.metrics.JsonLines``: a line a rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brimful import _C

_TAIL_BYTES = 1 << 16  # that hold a whole line at least
_SILENT_S, _SILENT_STEPS = 10.0, 10.0
_SLOW = 1.05  # times a usual rank's work: some rank always takes longest
_COLUMNS = (
    *("rank", "host", "step", "ms", "wait", "pieces"),
    *("rungs", "peak", "retries", "age", "mark"),
)
_LEFT = {"host", "mark"}
_HEADER = {"time", "job", "host", "rank", "world_size", "step", "ended"}

Line = Mapping[str, Any]


def _last_line(path: Path) -> Line | None:
    """The last whole line, of a file that is being written."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:  # it is gone again
        return None
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and found.keys() >= _HEADER:
            return found
    return None


def read_job(folder: Path) -> list[Line]:
    """What each rank wrote last, by name and rank; of several files of these the newest."""
    newest: dict[tuple[str, int], Line] = {}
    for path in folder.glob("*.jsonl"):
        line = _last_line(path)
        if line is None:
            continue
        key = _name(line), line["rank"]
        if line["time"] >= newest.get(key, {"time": 0})["time"]:
            newest[key] = line
    return [newest[key] for key in sorted(newest)]


def _name(line: Line) -> str:
    """Of its ``Metrics``, where a process has several."""
    return str(line.get("name", ""))


def _silent_after_s(line: Line, silent_s: float | None) -> float:
    if silent_s is not None:
        return silent_s
    return max(_SILENT_S, _SILENT_STEPS * float(line.get("step_seconds", 0)))


def _straggler(lines: Sequence[Line]) -> tuple[int, str]:
    """The rank that the others waited for in the last step that was reported, and its mark; -1 for none."""
    last = max(lines, key=lambda line: (not line["ended"], line["step"]))
    work = sorted(line["work_seconds"] for line in lines if line.get("work_seconds"))
    if "slowest_rank" in last and work:
        times = last["slowest_work_seconds"] / work[(len(work) - 1) // 2]
        return (
            (int(last["slowest_rank"]), f"straggler ({times:.2f}x)") if times > _SLOW else (-1, "")
        )
    return int(last.get("straggler_rank", -1)), "straggler"


def _mark(line: Line, age_s: float, silent_s: float | None, straggler: tuple[int, str]) -> str:
    if line["ended"]:
        return "ended"
    if age_s > _silent_after_s(line, silent_s):
        return "SILENT"
    marks = ["stops"] if line.get("stop") else []
    if line["rank"] == straggler[0]:
        marks.append(straggler[1])
    return ", ".join(marks)


def _number(line: Line, name: str, scale: float = 1, digits: int = 0) -> str:
    return f"{line[name] * scale:.{digits}f}" if name in line else "-"


def _rungs(line: Line) -> str:
    """Modules recomputed + offloaded."""
    if "recomputed_modules" not in line:
        return _number(line, "recomputed_stages")
    return f"{line['recomputed_modules']:.0f}+{line['offloaded_modules']:.0f}"


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _row(line: Line, now: float, silent_s: float | None, straggler: tuple[int, str]) -> list[str]:
    age_s = max(0.0, now - line["time"])
    return [
        str(line["rank"]),
        str(line["host"]),
        str(line["step"]),
        _number(line, "step_seconds", 1e3, 1),
        _number(line, "wait_seconds", 1e3, 1),
        _number(line, "pieces" if "pieces" in line else "microbatches"),
        _rungs(line),
        _C._format_bytes(int(line["peak_bytes"])) if "peak_bytes" in line else "-",
        _number(line, "retries_total"),
        _age(age_s),
        _mark(line, age_s, silent_s, straggler),
    ]


def _aligned(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if name in _LEFT else text.rjust(width)
            for name, text, width in zip(_COLUMNS, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def job_table(lines: Sequence[Line], now: float, silent_s: float | None = None) -> str:
    """The table of these lines, one for each name; ``now`` is seconds since 1970."""
    if not lines:
        return "no rank has written yet\n"
    names = sorted({_name(line) for line in lines})
    return "\n".join(_table([o for o in lines if _name(o) == n], n, now, silent_s) for n in names)


def _table(lines: Sequence[Line], name: str, now: float, silent_s: float | None) -> str:
    size = max(lines, key=lambda line: float(line["time"]))["world_size"]
    lines = [line for line in lines if line["rank"] < size]  # not of a larger world before
    straggler = _straggler(lines)
    rows = [_row(line, now, silent_s, straggler) for line in lines]
    missing = sorted(set(range(size)) - {line["rank"] for line in lines})
    jobs = ", ".join(sorted({line["job"] for line in lines if line["job"]})) or "job"
    jobs += name and f", {name}"
    head = f"{jobs}: {len(lines)} of {size} ranks"
    if missing:
        head += f"; no sample of rank {', '.join(map(str, missing[:8]))}"
        head += ", ..." if len(missing) > 8 else ""
    return f"{head}\n{_aligned([_COLUMNS, *rows])}"


def job_text(folder: Path, as_json: bool, silent_s: float | None) -> str:
    """The table of a folder now, or what each rank wrote last, a JSON line each."""
    lines = read_job(folder)
    if as_json:
        return "".join(json.dumps(line) + "\n" for line in lines)
    return job_table(lines, time.time(), silent_s)
