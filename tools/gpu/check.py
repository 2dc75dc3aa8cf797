"""What a part finds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OUTCOMES = (
    "ok",
    "bad",
    "skipped",
    "ended",
)  # ended: the process of a part did, before the part was done


@dataclass
class Check:
    """One line of a part. `value` is a number that a benchmark or a reader takes; `facts` are its conditions."""

    name: str
    outcome: str
    words: str = ""
    value: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The check as a JSON line."""
        return json.dumps(asdict(self), default=str)


def check(
    name: str, good: bool, words: str = "", value: float | None = None, **facts: Any
) -> Check:
    """A check that is right or is not."""
    return Check(name, "ok" if good else "bad", words, value, facts)


def skipped(name: str, why: str) -> Check:
    """A check that could not be made, and why."""
    return Check(name, "skipped", why)


def read(path: Path) -> list[Check]:
    """The checks of a file; a line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Check(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return found
