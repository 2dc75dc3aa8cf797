"""A budget that is cut to a half in the middle of a run and restored later, against an oracle that knows it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import common, intervals
from benchmarks.sizer import models

IDS = ("sizer.regrow_share",)
MODELS = ("MLP", "conv + BN", "encoder")
SHARES = (1.1, 0.55, 1.1)  # of the peak of the unsplit step
STEPS, QUICK_STEPS = 40, 4  # under each budget
ROUNDS, QUICK_ROUNDS = 7, 1
ORACLE, WITH, WITHOUT = "oracle", "predict=True", "predict=False"


@dataclass
class Run:
    """One pass through the budgets. `retries`: under each of them."""

    cpu_s: float = 0
    wall_s: float = 0
    retries: list[int] = field(default_factory=list)
    pieces: list[list[int]] = field(default_factory=list)

    @property
    def steps_to_whole(self) -> int | None:
        """Steps after the last budget began until the batch ran in one piece, or None."""
        return self.pieces[-1].index(1) if 1 in self.pieces[-1] else None


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the smallest share of the oracle's throughput, over models and with and without prediction."""
    steps = QUICK_STEPS if quick else STEPS
    rounds = QUICK_ROUNDS if quick else ROUNDS
    found: dict[str, list[intervals.Interval]] = {}
    conditions = common.machine_conditions()
    conditions.update(steps_under_each=steps, budgets=SHARES, models={})
    for name in MODELS:
        runs = _rounds(models.CASES[name], steps, rounds)
        of_model: dict[str, Any] = {}
        for how in (WITH, WITHOUT):
            share = intervals.median_ratio(
                [run.cpu_s for run in runs[ORACLE]], [run.cpu_s for run in runs[how]]
            )
            found.setdefault(how, []).append(share)
            of_model[how] = {
                "share_by_cpu_time": common.interval_dict(share),
                "share_by_wall_time": intervals.median(
                    [
                        oracle.wall_s / ours.wall_s
                        for oracle, ours in zip(runs[ORACLE], runs[how], strict=True)
                    ]
                ),
                "retries": runs[how][0].retries,
                "most_retries_of_a_cut": max(max(run.retries) for run in runs[how]),
                "pieces": [max(pieces[-1:]) for pieces in runs[how][0].pieces],
                "steps_to_whole": runs[how][0].steps_to_whole,
            }
            print(f"  {name:12s} {how:14s} {of_model[how]}")
        of_model[ORACLE] = [pieces[0] for pieces in runs[ORACLE][0].pieces]
        conditions["models"][name] = of_model
    worst = min((share for shares in found.values() for share in shares), key=lambda s: s.value)
    reason = _broken(conditions["models"])
    if reason is not None:
        yield common.unmeasured(IDS[0], reason, conditions=conditions)
        return
    yield common.Figure(
        IDS[0],
        "fraction",
        worst.value,
        worst.low,
        worst.high,
        ORACLE,
        rounds,
        conditions,
    )


def _broken(found: dict[str, Any]) -> str | None:
    """A share is no figure where a cut cost more than one retry, or the batch never became whole again."""
    for name, of_model in found.items():
        for how in (WITH, WITHOUT):
            entry = of_model[how]
            if entry["most_retries_of_a_cut"] > 1:
                return f"{name}, {how}: {entry['most_retries_of_a_cut']} retries under one budget"
            if entry["steps_to_whole"] is None:
                return f"{name}, {how}: the batch was not whole again"
    return None


def _rounds(case: models.Case, steps: int, rounds: int) -> dict[str, list[Run]]:
    import brimful

    torch.manual_seed(0)
    model = case.make()
    batch = case.batch(case.rows)
    unsplit = _peak(brimful, model, batch, 1)
    rooms = [int(share * unsplit) for share in SHARES]
    splits = [_best_split(brimful, model, batch, room) for room in rooms]
    runs: dict[str, list[Run]] = {ORACLE: [], WITH: [], WITHOUT: []}
    for number in range(rounds):
        order = list(runs)
        order = order[number % 3 :] + order[: number % 3]
        for how in order:
            known = splits if how == ORACLE else [None] * len(rooms)
            runs[how].append(_run(brimful, model, batch, rooms, known, steps, how == WITH))
    return runs


def _run(
    brimful: Any,
    model: torch.nn.Module,
    batch: torch.Tensor,
    rooms: Sequence[int],
    splits: Sequence[list[int] | None],
    steps: int,
    predict: bool,
) -> Run:
    sizer = brimful.BatchSizer(model, predict=predict)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    run = Run()
    gc.collect()
    used = brimful.memory.stats("cpu").used_bytes
    try:
        for room, split in zip(rooms, splits, strict=True):
            brimful.memory.set_limit("cpu", used + room)
            run.retries.append(0)
            run.pieces.append([])
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(steps):
                outcome = sizer.step(batch, models.loss, split=split)
                optimizer.step()
                optimizer.zero_grad()
                run.retries[-1] += outcome.retries
                run.pieces[-1].append(outcome.pieces)
            run.cpu_s += time.process_time() - cpu
            run.wall_s += time.perf_counter() - wall
    finally:
        brimful.memory.set_limit("cpu", None)
    return run


def _split(rows: int, pieces: int) -> list[int]:
    return [len(part) for part in torch.arange(rows).tensor_split(pieces)]


def _peak(brimful: Any, model: torch.nn.Module, batch: torch.Tensor, pieces: int) -> int:
    sizer = brimful.BatchSizer(model, predict=False)
    for _ in range(2):  # what is made once is made in the first
        gc.collect()
        before = brimful.memory.stats("cpu").used_bytes
        outcome = sizer.step(batch, models.loss, split=_split(len(batch), pieces))
        model.zero_grad()
    return int(outcome.peak_bytes - before)


def _best_split(brimful: Any, model: torch.nn.Module, batch: torch.Tensor, room: int) -> list[int]:
    """The fewest pieces that fit, by running them."""
    pieces = 1
    while _peak(brimful, model, batch, pieces) > room:
        pieces += 1
    return _split(len(batch), pieces)
