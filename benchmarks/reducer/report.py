"""What the reducer's figures share on the parent's side: requests, ranks' samples, printed cases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common, intervals
from benchmarks.reducer import cases
from benchmarks.reducer.rounds import Samples

STALL_S = 60.0
# torch rebuilds its buckets in the second iteration.
WARM_UP_ROUNDS = 4
QUICK_WARM_UP_ROUNDS = 2

Columns = dict[str, list[float]]
Conditions = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What run.py asks for. `ours` stands in our place, in the harness's own tests."""

    quick: bool = False
    ours: str | None = None
    stall_s: float = STALL_S

    def rounds(self, full: int, quick: int) -> int:
        """Returns how many rounds are timed."""
        return quick if self.quick else full

    @property
    def warm_up_rounds(self) -> int:
        """Returns how many rounds run before those."""
        return QUICK_WARM_UP_ROUNDS if self.quick else WARM_UP_ROUNDS

    def factory(self, default: str = cases.OURS) -> str:
        """Returns the `module:function` that wraps a module in ours."""
        return self.ours or default


class Unmeasured(Exception):
    """A figure that ran and has no value; its message becomes the reason."""


def why_not(by_rank: Sequence[Samples]) -> str | None:
    """Returns why the samples are of no use, or None."""
    for rank, samples in enumerate(by_rank):
        for name, error in samples.failed_peers.items():
            return f"peer torch:{name} failed on rank {rank}, so the best is unknown: {error}"
        for name, difference in samples.wrong.items():
            return f"rank {rank}: {name} {difference}"
    return None


def require_usable(by_rank: Sequence[Samples]) -> None:
    """Raises Unmeasured for a peer that failed or a gradient that differs."""
    reason = why_not(by_rank)
    if reason is not None:
        raise Unmeasured(reason)


def wall_and_cpu(by_rank: Sequence[Samples]) -> tuple[Columns, Columns]:
    """Returns the columns over all ranks.

    A step ends when its slowest rank ends; CPU time is a rank's own, averaged.
    """
    wall = over_ranks([samples.wall_s for samples in by_rank], max)
    cpu = over_ranks([samples.cpu_s for samples in by_rank], lambda row: sum(row) / len(row))
    return wall, cpu


def over_ranks(columns: list[Columns], reduce: Callable[[list[float]], float]) -> Columns:
    """Returns columns in which each round is the ranks' values put through `reduce`."""
    return {
        name: [reduce(list(row)) for row in zip(*(c[name] for c in columns), strict=True)]
        for name in columns[0]
    }


def medians_of(wall: Columns, cpu: Columns) -> dict[str, dict[str, float]]:
    """Returns each case's medians as `conditions.cases` has them."""
    return {
        name: {"wall_s": intervals.median(wall[name]), "cpu_s": intervals.median(cpu[name])}
        for name in wall
    }


def best_torch(wall: Columns) -> str:
    """Returns the fastest of torch's cases by median."""
    names = [name for name in wall if name.startswith(cases.TORCH)]
    return min(names, key=lambda name: intervals.median(wall[name]))


def above(columns: Columns, ours: str, base: str) -> intervals.Interval:
    """Returns the fraction by which `ours` is above `base`: the median over rounds."""
    found = intervals.median_ratio(columns[ours], columns[base])
    return intervals.Interval(found.value - 1, found.low - 1, found.high - 1)


def figure_of(
    figure_id: str,
    value: intervals.Interval,
    rounds: int,
    conditions: Conditions,
    peer: str | None = None,
) -> common.Figure:
    """Returns a measured figure, with the unit that ids.json gives it."""
    unit = common.load_ids()[figure_id].unit
    return common.Figure(
        figure_id, unit, value.value, value.low, value.high, peer, rounds, conditions
    )


def print_cases(
    figure_id: str, measured: Mapping[str, dict[str, float]], base: str | None, peer: str | None
) -> None:
    """Prints all cases, the fastest first; `base` is what the column `above` is taken from."""
    title = f"above {base}" if base else ""
    print(f"\n{figure_id}: medians in ms (wall, {title + ', ' if title else ''}CPU time a rank)")
    for name, times in sorted(measured.items(), key=lambda item: item[1]["wall_s"]):
        more = ""
        if base is not None and not name.startswith("bound:"):
            more = f"{(times['wall_s'] - measured[base]['wall_s']) * 1e3:+9.3f}"
        mark = "  <- peer" if name == peer else ""
        wall_ms, cpu_ms = times["wall_s"] * 1e3, times["cpu_s"] * 1e3
        print(f"  {name:<26}{wall_ms:9.3f} {more:>9} {cpu_ms:9.3f}{mark}")
    sys.stdout.flush()


def print_line(text: str, value: object) -> None:
    """Prints one more thing that stands beside a figure."""
    shown = "not above the noise" if value is None else value
    if isinstance(value, dict) and {"value", "low", "high"} <= set(value):
        shown = f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    print(f"  {text + ':':<44}{shown}", flush=True)
