"""A step of ranks of which one is half as fast, against work that could be divided at will."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks import common, intervals, ranks
from benchmarks.fleet import work

IDS = ("fleet.slow_rank",)
PEER = "perfectly divisible work"
SLOWNESS = ((1.0, 2.0), (1.0, 2.0, 1.0, 1.0))
MS_PER_ROW, QUICK_MS_PER_ROW = 2.0, 0.2
STEPS, QUICK_STEPS = 50, 20
LAG = 2
UNSETTLED = LAG + 5  # steps that do not count
STALL_S = 60.0


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the larger of the ratios for two and four ranks; both, and those of even shares, are conditions."""
    ms_per_row = QUICK_MS_PER_ROW if quick else MS_PER_ROW
    steps = QUICK_STEPS if quick else STEPS
    conditions = {**work.conditions(ms_per_row), "lag": LAG, "steps_before": UNSETTLED}
    worst: intervals.Interval | None = None
    for slowness in SLOWNESS:
        name = f"one of {len(slowness)}"
        try:
            for kind, lag in (("shares", LAG), ("even", work.EVENLY)):
                found = _ratio(slowness, ms_per_row, steps, lag)
                conditions[f"{name}, {kind}"] = common.interval_dict(found)
                if kind == "shares" and (worst is None or found.value > worst.value):
                    worst = found
        except ranks.RanksFailed as error:
            yield common.unmeasured(IDS[0], str(error), conditions=conditions)
            return
    assert worst is not None
    yield common.Figure(
        IDS[0],
        "ratio",
        worst.value,
        worst.low,
        worst.high,
        peer=PEER,
        rounds=steps - UNSETTLED,
        conditions=conditions,
    )


def _ratio(
    slowness: Sequence[float], ms_per_row: float, steps: int, lag: int
) -> intervals.Interval:
    by_rank = ranks.run_ranks(
        len(slowness), _rank, steps, ms_per_row, slowness, lag, stall_s=STALL_S
    )
    seconds = [max(step) for step in zip(*(seen.seconds for seen in by_rank), strict=True)]
    counted = seconds[UNSETTLED:]
    ideal = 1e-3 * work.ideal_ms(ms_per_row, slowness)
    return intervals.median_ratio(counted, [ideal] * len(counted))


def _rank(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    steps: int,
    ms_per_row: float,
    slowness: Sequence[float],
    lag: int,
) -> work.Steps:
    return work.run(rank, world_size, progress, steps + 1, ms_per_row, lambda _: slowness, lag)
