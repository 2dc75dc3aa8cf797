"""How soon shares follow a rank that becomes slower, or fast again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks import common, ranks
from benchmarks.fleet import work

IDS = ("fleet.settle_steps",)
LAGS = (2, 6)
WORLDS = (2, 4)
NEAR = 1.05
MS_PER_ROW, QUICK_MS_PER_ROW = 0.5, 0.2
PERIOD = 30  # steps between two changes
CHANGES, QUICK_CHANGES = 6, 2
STALL_S = 60.0


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the most steps beyond the lag; those of each change are conditions."""
    ms_per_row = QUICK_MS_PER_ROW if quick else MS_PER_ROW
    changes = QUICK_CHANGES if quick else CHANGES
    conditions = work.conditions(ms_per_row)
    most = 0
    for world_size in WORLDS:
        for lag in LAGS:
            try:
                shares = ranks.run_ranks(
                    world_size, _rank, changes, ms_per_row, lag, stall_s=STALL_S
                )[0].shares
            except ranks.RanksFailed as error:
                yield common.unmeasured(IDS[0], str(error), conditions=conditions)
                return
            needed = [_needed(shares, change, world_size) - lag for change in range(changes)]
            conditions[f"{world_size} ranks, lag {lag}"] = needed
            most = max(most, *needed)
    runs = len(WORLDS) * len(LAGS) * changes
    yield common.Figure(IDS[0], "count", most, most, most, rounds=runs, conditions=conditions)


def _needed(shares: Sequence[Sequence[int]], change: int, world_size: int) -> int:
    """Returns the steps from a change to the first behind which all are near, up to the next change."""
    begin = PERIOD * (change + 1)
    needed = 0
    for step in range(begin, begin + PERIOD):
        slowness = _slowness(world_size, step)
        took = work.largest_ms(1.0, slowness, shares[step])
        if took > NEAR * work.ideal_ms(1.0, slowness):
            needed = step + 1 - begin
    return needed


def _slowness(world_size: int, step: int) -> list[float]:
    """Rank 1 is half as fast in every other period."""
    return [1.0, 1.0 + step // PERIOD % 2, *[1.0] * (world_size - 2)]


def _rank(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    changes: int,
    ms_per_row: float,
    lag: int,
) -> work.Steps:
    steps = PERIOD * (changes + 1)
    return work.run(
        rank, world_size, progress, steps, ms_per_row, lambda step: _slowness(world_size, step), lag
    )
