"""The share of allocations whose line is not known, in training of twelve models."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import brimful
from benchmarks import common
from benchmarks.sizer import models

IDS = ("probes.unsited",)
STEPS = 3


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the share over all models; a count has no interval."""
    births = unsited = 0
    by_model: dict[str, dict[str, float]] = {}
    for name, case in models.CASES.items():
        torch.manual_seed(0)
        model = case.make()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        with brimful.memory.track():
            for _ in range(STEPS):
                models.loss(model, case.batch(8 if quick else 64)).backward()
                optimizer.step()
                optimizer.zero_grad()
            counts = brimful.memory.tracking_counts()
        by_model[name] = {"births": counts.births, "unsited": counts.unsited}
        births += counts.births
        unsited += counts.unsited
    conditions = common.machine_conditions()
    conditions.update(
        models=by_model, steps=STEPS, value="allocations without a line / allocations"
    )
    share = unsited / births
    print(f"\nprobes.unsited: {unsited} of {births}")
    yield common.Figure(
        IDS[0], "fraction", share, share, share, None, rounds=1, conditions=conditions
    )
