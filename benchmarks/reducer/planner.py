"""Buckets that the planner chose against the best of fixed sizes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import common, intervals, ranks
from benchmarks.reducer import cases, report, rounds, worker
from benchmarks.reducer.report import Conditions, Request
from benchmarks.reducer.rounds import Samples

IDS = ("reducer.planner",)
# Parameters of 1 MiB, none large enough to be a bucket of its own.
MODEL = cases.Model(layers=48, width=512, batch=16, bias=True)
WORLD_SIZE = 2
ALL_MB = 1000.0
SIZES_MB = (1.0, 5.0, 10.0, 25.0, 50.0, ALL_MB)
ROUNDS, QUICK_ROUNDS = 60, 4
AUTO, AGAIN = "auto", "again"


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Chooses the best fixed size in one run, then compares the planner with it in a fresh one."""
    count = request.rounds(ROUNDS, QUICK_ROUNDS)
    ours = request.factory()
    conditions.update(
        ours=ours,
        model=MODEL.text,
        batch_per_rank=MODEL.batch,
        world_size=WORLD_SIZE,
        backend="gloo",
        zero_grad="set_to_none=True",
        value="auto / best fixed size - 1, whole steps",
        warm_up_rounds=request.warm_up_rounds,
    )

    fixed = {_name(size): cases.fixed_plan(size) for size in SIZES_MB}
    auto = {AUTO: {"plan": "auto"}}
    choosing = run(request, {**fixed, **auto}, WORLD_SIZE)
    conditions.update(parameters=choosing[0].parameters, gradient_bytes=choosing[0].gradient_bytes)
    wall, cpu = report.wall_and_cpu(choosing)
    best = choose(wall)
    conditions["choosing"] = {"best": best, "cases": report.medians_of(wall, cpu)}
    report.print_cases("reducer.planner, choosing", conditions["choosing"]["cases"], None, best)

    fresh = run(request, {**auto, best: fixed[best], AGAIN: fixed[best]}, WORLD_SIZE)
    wall, cpu = report.wall_and_cpu(fresh)
    conditions["cases"] = report.medians_of(wall, cpu)
    conditions["plan"] = fresh[0].more["plan"]
    conditions["a_a"] = common.interval_dict(report.above(wall, AGAIN, best))
    report.print_cases("reducer.planner, fresh", conditions["cases"], None, best)
    report.print_line(f"A/A, {best} again above {best}", conditions["a_a"])
    print(f"  plan of auto:\n{conditions['plan']}", flush=True)
    value = report.above(wall, AUTO, best)
    yield report.figure_of("reducer.planner", value, count, conditions, f"fixed: {best}")


def run(request: Request, plans: dict[str, dict[str, Any]], world_size: int) -> list[Samples]:
    """Times ours with each plan."""
    by_rank: list[Samples] = ranks.run_ranks(
        world_size,
        work,
        MODEL,
        request.warm_up_rounds,
        request.rounds(ROUNDS, QUICK_ROUNDS),
        request.factory(),
        plans,
        stall_s=request.stall_s,
    )
    report.require_usable(by_rank)
    return by_rank


def _name(size_mb: float) -> str:
    return "all" if size_mb == ALL_MB else f"{size_mb:g} MB"


def choose(wall: report.Columns) -> str:
    """Returns the fixed size with the smallest median."""
    return min((n for n in wall if n != AUTO), key=lambda n: intervals.median(wall[n]))


def work(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    model: cases.Model,
    warm_up_rounds: int,
    timed_rounds: int,
    ours: str,
    plans: dict[str, dict[str, Any]],
) -> Samples:
    """Runs ours with each plan on one rank; gradients are checked against torch's default."""
    warnings.filterwarnings("ignore")
    make_ours = cases.resolve(ours)
    samples = Samples()
    base, x = model.make(), model.data(rank)
    samples.describe(base)
    modules = {name: make_ours(copy.deepcopy(base), **plan) for name, plan in plans.items()}
    steps = {name: worker.training_step(module, x) for name, module in modules.items()}
    peer = worker.training_step(cases.make_torch(copy.deepcopy(base), cases.TorchCase({})), x)

    def check() -> None:
        peer.run()
        rounds.check_gradients({**steps, worker.REFERENCE: peer}, worker.REFERENCE, samples)

    rounds.interleave(steps, warm_up_rounds, timed_rounds, progress, samples, check)
    samples.more["plan"] = str(getattr(modules[AUTO], "plan", ""))
    return samples
