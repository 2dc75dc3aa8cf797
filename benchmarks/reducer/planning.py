"""Buckets that the planner chose against those of torch's sizes, with two ranks and with four."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import common
from benchmarks.reducer import planner, report
from benchmarks.reducer.planner import AGAIN, AUTO, MODEL, QUICK_ROUNDS, ROUNDS
from benchmarks.reducer.report import Conditions, Request

WORLD_SIZES = {"reducer.planning_w2": 2, "reducer.planning_w4": 4}
IDS = tuple(WORLD_SIZES)
TORCHS = "torch's sizes"


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Times both after the steps in which sizes are tried."""
    ordered = {"plan": "ordered"}
    plans = {AUTO: {"plan": "auto"}, TORCHS: ordered, AGAIN: ordered}
    for name, world_size in WORLD_SIZES.items():
        by_rank = planner.run(request, plans, world_size)
        wall, cpu = report.wall_and_cpu(by_rank)
        conditions.update(
            ours=request.factory(),
            model=MODEL.text,
            batch_per_rank=MODEL.batch,
            world_size=world_size,
            backend="gloo",
            value="auto / torch's sizes - 1, whole steps",
            warm_up_rounds=request.warm_up_rounds,
            cases=report.medians_of(wall, cpu),
            a_a=common.interval_dict(report.above(wall, AGAIN, TORCHS)),
            plan=by_rank[0].more["plan"],
        )
        report.print_cases(name, conditions["cases"], None, TORCHS)
        report.print_line("A/A, torch's sizes again above themselves", conditions["a_a"])
        gained = report.above(wall, AUTO, TORCHS)
        yield report.figure_of(
            name, gained, request.rounds(ROUNDS, QUICK_ROUNDS), conditions, TORCHS
        )
