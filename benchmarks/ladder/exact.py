"""Gradients, buffers and random numbers of steps on any rung, against those of the step with room: bit-equal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from benchmarks import common
from benchmarks.ladder import cases, plans
from benchmarks.sizer import trials

IDS = ("ladder.exact_bad",)
RANDOM_PLANS, QUICK_RANDOM_PLANS = 6, 0
QUICK_MODELS = ("conv + BN", "encoder")
LOSSES: dict[str, plans.Loss] = {"plain": trials.noisy_loss, "autocast": plans.half}
STEPS = 2  # of each plan: the first verifies what is recomputed, the second does not
SHOWN = 20


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields how many steps of all models, losses and plans ended with other bits."""
    with plans.quiet():  # of BatchNorm, which normalises each piece by itself
        yield _measure(quick)


def _measure(quick: bool) -> common.Figure:
    bad: list[str] = []
    conditions = common.machine_conditions()
    conditions.update(models={}, steps=0, pieces=plans.ROW_BY_ROW)
    for name in QUICK_MODELS if quick else cases.CASES:
        for words, loss in LOSSES.items():
            found = _compare(cases.CASES[name], loss, QUICK_RANDOM_PLANS if quick else RANDOM_PLANS)
            bad += [f"{name}, {words}, {line}" for line in found.pop("bad")]
            conditions["steps"] += found["steps"]
            conditions["models"][f"{name}, {words}"] = found
            print(f"  {name:15s} {words:9s} {found}")
    conditions["bad"] = bad[:SHOWN]
    print(
        f"\nladder.exact_bad: {len(bad)} of {conditions['steps']} steps", *bad[:SHOWN], sep="\n  "
    )
    count = len(bad)
    return common.Figure(
        IDS[0], "count", count, count, count, rounds=conditions["steps"], conditions=conditions
    )


def _compare(case: cases.Case, loss: plans.Loss, count: int) -> dict[str, Any]:
    import brimful

    torch.manual_seed(0)
    model = case.make()
    batch = case.draw(cases.ROWS, case.small)
    start = [buffer.clone() for buffer in model.buffers()]

    def step(sizer: Any, rungs: Any = None) -> tuple[Any, Any]:
        plans.clear(model)
        for buffer, value in zip(model.buffers(), start, strict=True):
            buffer.copy_(value)
        torch.manual_seed(2)
        random.seed(2)
        numpy.random.seed(2)
        outcome = sizer.step(batch, loss, split=plans.ROW_BY_ROW, rungs=rungs)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return outcome, (grads + [b.clone() for b in model.buffers()], trials.rng_states())

    expected = step(brimful.BatchSizer(model, predict=False))[1]
    _, modules = plans.recorded(model, batch, loss)
    chosen = plans.sample(modules, count)
    found: dict[str, Any] = {"plans": len(chosen), "steps": 0, "changed_by_the_step": 0, "bad": []}
    for name, plan in chosen.items():
        sizer = brimful.BatchSizer(model, predict=False, ladder="auto")
        for _ in range(STEPS):
            asked = plans.named(modules, plan)
            outcome, state = step(sizer, asked)
            found["steps"] += 1
            found["changed_by_the_step"] += outcome.rungs != asked
            if not trials.same_bits(state[0], expected[0]) or state[1] != expected[1]:
                found["bad"].append(f"{name}: {plans.describe(outcome.rungs)}")
    plans.clear(model)
    return found
