"""The file of results, JSON lines; it is what a later run resumes from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.gpu.check import Check

ORDER = ("ended", "bad", "ok", "skipped")


def outcome_of(checks: Sequence[Check]) -> str:
    """A part's outcome is that of its worst check; all skipped: skipped."""
    found = {check.outcome for check in checks}
    return next((outcome for outcome in ORDER if outcome in found), "ok")


class Results:
    """A part's lines are written when it is done, its own last: a part without that line has not run."""

    def __init__(self, path: Path, machine: dict[str, Any], resume: bool) -> None:
        self._path, self._machine = path, machine
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if resume and path.exists() else []
        if not resume:
            path.write_text("")
        self.parts: dict[str, dict[str, Any]] = {}
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # a run that was killed
                continue
            if entry.get("check") == "" and entry.get("machine") == machine:
                self.parts[entry["part"]] = entry

    def add(self, part: str, checks: Sequence[Check], seconds: float) -> str:
        """Writes a part's checks and its outcome, which it returns."""
        outcome = outcome_of(checks)
        counts = {name: sum(c.outcome == name for c in checks) for name in ORDER}
        entry = {
            "part": part,
            "check": "",
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "counts": counts,
            "machine": self._machine,
        }
        with self._path.open("a") as file:
            for found in checks:
                line = {"part": part, **asdict(found)}
                line["check"] = line.pop("name")
                file.write(json.dumps(line, default=str) + "\n")
            file.write(json.dumps(entry) + "\n")
        self.parts[part] = entry
        return outcome


def table(parts: dict[str, dict[str, Any]]) -> str:
    """A line for each part that has run."""
    rows = [f"{'part':36}{'outcome':10}{'ok':>5}{'bad':>5}{'skipped':>9}{'seconds':>9}"]
    for name, entry in parts.items():
        counts = entry["counts"]
        bad = counts["bad"] + counts["ended"]
        rows.append(
            f"{name:36}{entry['outcome']:10}{counts['ok']:>5}{bad:>5}{counts['skipped']:>9}"
            f"{entry['seconds']:>9.1f}"
        )
    return "\n".join(rows)
