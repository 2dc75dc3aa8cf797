"""How many of the real errors in tests/errors are explained right, those of which nothing is known among them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks import common
from brimful import _C

IDS = ("probes.errors_right",)
CORPUS = Path(__file__).resolve().parents[2] / "tests" / "errors"


def measure(quick: bool) -> Iterator[common.Figure]:
    """Counts those whose kind, verdict on memory and, where stated, cause are the expected ones."""
    wrong = []
    false_ooms = 0
    paths = sorted(CORPUS.glob("*.json"))
    for path in paths:
        case = json.loads(path.read_text())
        out = _C._explain(case["text"], case["types"], case.get("free_bytes"), None, False)
        judged = {"kind": out.kind, "is_memory": out.is_memory}
        named = case.get("cause", "") in out.cause and case.get("remedy", "") in out.remedy
        if judged != case["expect"] or not named:
            wrong.append(path.stem)
        false_ooms += bool(out.is_memory and case["expect"]["is_memory"] is False)
    right = len(paths) - len(wrong)
    yield common.Figure(
        "probes.errors_right",
        "count",
        value=right,
        low=right,
        high=right,
        rounds=1,
        conditions={"texts": len(paths), "wrong": wrong, "false_ooms": false_ooms},
    )
