"""What it costs that weights are known only after backward: a second pass over the buffers."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import common, ranks
from benchmarks.reducer import cases, report, rounds
from benchmarks.reducer.report import Conditions, Request
from benchmarks.reducer.rounds import Samples, Step

IDS = ("reducer.rescale",)
MODEL = cases.Model(layers=6, width=1400, batch=16, bias=False)
WORLD_SIZE = 2
ROUNDS, QUICK_ROUNDS = 60, 5
KNOWN, KNOWN_AGAIN, UNKNOWN = "known", "known_again", "unknown"

Batch = tuple[torch.Tensor, torch.Tensor]


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Yields the fraction by which a step with unknown weights is above one with known ones."""
    count = request.rounds(ROUNDS, QUICK_ROUNDS)
    ours = request.factory(cases.OURS_ORDERED)
    conditions.update(
        ours=ours,
        model=MODEL.text,
        batch_per_rank=MODEL.batch,
        world_size=WORLD_SIZE,
        backend="gloo",
        value="unknown / known - 1, whole steps of a BatchSizer",
        warm_up_rounds=request.warm_up_rounds,
    )
    by_rank = ranks.run_ranks(
        WORLD_SIZE, work, MODEL, request.warm_up_rounds, count, ours, stall_s=request.stall_s
    )
    conditions.update(parameters=by_rank[0].parameters, gradient_bytes=by_rank[0].gradient_bytes)
    report.require_usable(by_rank)
    wall, cpu = report.wall_and_cpu(by_rank)
    conditions["cases"] = report.medians_of(wall, cpu)
    conditions["a_a"] = common.interval_dict(report.above(wall, KNOWN_AGAIN, KNOWN))
    conditions["cpu_time"] = common.interval_dict(report.above(cpu, UNKNOWN, KNOWN))
    report.print_cases("reducer.rescale", conditions["cases"], KNOWN, None)
    report.print_line("the second pass, by CPU time", conditions["cpu_time"])
    report.print_line("A/A, known again / known - 1", conditions["a_a"])
    value = report.above(wall, UNKNOWN, KNOWN)
    yield report.figure_of("reducer.rescale", value, count, conditions, "weights known before")


def work(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    model: cases.Model,
    warm_up_rounds: int,
    timed_rounds: int,
    ours: str,
) -> Samples:
    """Runs the cases of one rank; checks their gradients against sums that this makes by itself."""
    warnings.filterwarnings("ignore")
    make_ours = cases.resolve(ours)
    base, data = model.make(), _batches(model, rank)
    samples = Samples()
    samples.describe(base)
    weights = {KNOWN: _weight, KNOWN_AGAIN: _weight, UNKNOWN: None}
    steps = {
        name: _sizer_step(make_ours(copy.deepcopy(base)), data, weight_fn)
        for name, weight_fn in weights.items()
    }
    # Every case has had equally many steps whenever gradients are checked.
    done = itertools.accumulate([warm_up_rounds, timed_rounds])

    def check() -> None:
        batch = data[(next(done) - 1) % len(data)]
        reference = {"the weighted mean": _weighted_mean(copy.deepcopy(base), batch)}
        rounds.check_gradients({**steps, **reference}, "the weighted mean", samples)

    rounds.interleave(steps, warm_up_rounds, timed_rounds, progress, samples, check)
    return samples


def _batches(model: cases.Model, rank: int) -> list[Batch]:
    """Two batches whose token counts differ: the last step's total never serves for the next."""
    found = []
    for k in range(2):
        mask = torch.zeros(model.batch)
        mask[: max(1, model.batch // 2 + (4 * k + rank) % (model.batch // 2))] = 1
        found.append((model.data(rank + 2 * k), mask))
    return found


def _weight(batch: Any) -> float:
    return float(batch[1].sum())


def _loss(module: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """The mean over the tokens that the mask lets through, and their number."""
    x, mask = batch
    tokens = _weight(batch)
    return (module(x).sum(1) * mask).sum() / tokens, tokens


def _sizer_step(
    module: nn.Module, data: list[Batch], weight_fn: Callable[[Any], float] | None
) -> Step:
    import brimful

    sizer = brimful.BatchSizer(module, weight_fn=weight_fn)
    batches = sizer.batches(itertools.cycle(data))

    def run() -> None:
        module.zero_grad(set_to_none=True)
        sizer.step(next(batches), _loss)

    return Step(run, list(module.parameters()))


def _weighted_mean(module: nn.Module, batch: Batch) -> Step:
    """Returns parameters that hold the mean over the tokens of all ranks."""
    loss, tokens = _loss(module, batch)
    (loss * tokens).backward()
    total = torch.tensor([tokens], dtype=torch.float64)
    dist.all_reduce(total)
    parameters = list(module.parameters())
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= float(total)
    return Step(lambda: None, parameters)
