"""All figures of the reducer; every failure of one becomes its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks import common, ranks
from benchmarks.reducer import (
    compiled,
    control_record,
    extra_buckets,
    first,
    host_wait,
    planner,
    planning,
    report,
    rescale,
    steps,
    unused,
)


@dataclass(frozen=True)
class Benchmark:
    """One run of some ranks and the figures that come out of it.

    `measure` fills the conditions before it measures, so that a failure keeps them. It may raise
    report.Unmeasured or ranks.RanksFailed.
    """

    ids: tuple[str, ...]
    measure: Callable[[report.Request, report.Conditions], Iterator[common.Figure]]


def benchmarks() -> list[Benchmark]:
    """Returns all, in the order in which they run."""
    modules = (
        extra_buckets,
        rescale,
        first,
        unused,
        planner,
        planning,
        control_record,
        compiled,
        host_wait,
    )
    return [
        *(Benchmark((name,), steps.measure_of(name)) for name in steps.SPECS),
        *(Benchmark(module.IDS, module.measure) for module in modules),
    ]


def figures(
    quick: bool,
    only: Sequence[str] = (),
    ours: str | None = None,
    stall_s: float = report.STALL_S,
) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    request = report.Request(quick, ours, stall_s)
    for benchmark in benchmarks():
        wanted = [name for name in benchmark.ids if not only or name in only]
        if wanted:
            yield from _attempt(benchmark, wanted, request)


def _attempt(
    benchmark: Benchmark, wanted: list[str], request: report.Request
) -> Iterator[common.Figure]:
    conditions = common.machine_conditions()
    try:
        for figure in benchmark.measure(request, conditions):
            if figure.id in wanted:
                wanted.remove(figure.id)
                yield figure
    except (report.Unmeasured, ranks.RanksFailed) as error:
        for name in wanted:
            yield common.unmeasured(name, str(error), conditions=dict(conditions))
