"""The predicted peak of plans, against their real one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import common
from benchmarks.ladder import cases, plans
from benchmarks.sizer import models

IDS = ("ladder.predict_worst",)
RANDOM_PLANS, QUICK_RANDOM_PLANS = 10, 2
QUICK_MODELS = ("MLP", "U-Net")
BESIDE_BYTES = 16384  # that the ladder adds to every plan, for what a step takes beside its pieces
SHORT = 1.0  # added to the figure where a plan was short


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the largest error above the real peak; more than 1 where a plan's was short."""
    rows: list[dict[str, Any]] = []
    for name in QUICK_MODELS if quick else cases.CASES:
        of_model = _measure(name, QUICK_RANDOM_PLANS if quick else RANDOM_PLANS)
        rows += of_model
        shown = (
            f"{min(r['above'] for r in of_model):+.3%} to {max(r['above'] for r in of_model):+.3%}"
        )
        least = min(r["spare_bytes"] for r in of_model)
        print(f"  {name:15s} {len(of_model):3d} plans, {shown}, least to spare {least} bytes")
    worst = max(rows, key=lambda row: row["above"])
    lowest = min(rows, key=lambda row: row["spare_bytes"])
    short = [row for row in rows if row["spare_bytes"] < 0]
    value = max(0.0, worst["above"]) + (SHORT if short else 0)
    conditions = common.machine_conditions()
    conditions.update(
        worst_above=worst,
        worst_short=lowest,
        short=short[:20],
        short_count=len(short),
        beside_bytes=BESIDE_BYTES,
        value="largest predicted / real - 1; 1 more where real > predicted + beside_bytes",
    )
    print(f"\nladder.predict_worst: {value:.4f}\n  above: {worst}\n  least to spare: {lowest}")
    yield common.Figure(
        IDS[0], "fraction", value, value, value, rounds=len(rows), conditions=conditions
    )


def _measure(name: str, count: int) -> list[dict[str, Any]]:
    import brimful

    case = cases.CASES[name]
    torch.manual_seed(0)
    model = case.make()
    batch = case.batch(cases.ROWS)
    sizer = brimful.BatchSizer(model, predict=False, ladder="auto", batch_norm="freeze")

    def peak(rungs: Any = None) -> int:
        plans.clear(model)
        gc.collect()
        before = plans.used_bytes()
        outcome = sizer.step(batch, models.loss, split=plans.ROW_BY_ROW, rungs=rungs)
        asked = rungs is None or outcome.rungs == rungs
        return int(outcome.peak_bytes) - before if asked else -1

    for _ in range(2):  # what is made once
        peak()
    events, modules = plans.recorded(model, batch)
    found = []
    for words, plan in plans.sample(modules, count).items():
        whole = modules.allowed()[2]
        rungs = plans.named(modules, plan)
        for when in ("first", "later"):
            told = events.cost_of(plan, whole if when == "first" else [])[0]
            real = peak(rungs)
            if real < 0 or (when == "later" and plan.everything):
                continue
            found.append(
                {
                    "model": name,
                    "plan": f"{words} ({when}): {plans.describe(rungs)}"[:300],
                    "predicted": told,
                    "real": real,
                    "above": told / real - 1,
                    "spare_bytes": told + BESIDE_BYTES - real,
                }
            )
        # A module that was verified runs to its last saved tensor only.
        modules._verified.update(plan.recomputed)
    plans.clear(model)
    return found
