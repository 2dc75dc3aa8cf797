"""What a job of many ranks gets done where ranks differ and die: `python -m benchmarks.fleet.simulate`.

Shares are those of brimful's own rule, by its binding, step by step; times and failures are drawn. Prints the table of
README.md; `tools/pictures/draw.py fleet` draws it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from brimful import _C

RANKS = (8, 64, 512, 1024, 4096)
ROWS_PER_RANK = 64
STEPS = 400
LAG = 6
SEEDS = 3  # at least; of few ranks more

Floats = np.ndarray  # of float64, by rank


@dataclass(frozen=True)
class Speeds:
    """How long a row takes on each rank: its own factor, a spell of throttling, and what differs from step to step."""

    spread: float = 0.05  # sigma of a lognormal factor that a rank keeps
    jitter: float = 0.02  # sigma of one of each step
    throttled: float = 0.01  # of the ranks, at a time,
    throttled_times: float = 1.5  # are so much slower,
    throttled_steps: float = 2000.0  # for so many steps, on average


@dataclass(frozen=True)
class Failures:
    """When ranks die, and what that costs. Seconds."""

    mtbf_h: float = 50_000.0  # of a rank
    host_share: float = 0.3  # of the failures take all ranks of a host
    ranks_of_a_host: int = 8
    step_s: float = 1.0
    checkpoint_s: float = 30.0  # that each checkpoint holds training up
    restart_s: float = 300.0  # until all ranks are started, have loaded the checkpoint and are warm
    detect_s: float = 1.0  # until the others know of a rank that died
    heal_s: float = 0.5  # until the survivors go on
    away_s: float = (
        3600.0  # until a rank that died is replaced, which the others wait for as for a failure
    )
    days: float = 60.0

    def failures_per_s(self, ranks: int) -> float:
        return ranks / (self.mtbf_h * 3600)

    def checkpoint_every_s(self, ranks: int) -> float:
        """The interval that loses least where every failure goes back to it (Young)."""
        return math.sqrt(2 * self.checkpoint_s / self.failures_per_s(ranks))


class RowTimes:
    """Draws a row's time on each rank, step by step."""

    def __init__(self, ranks: int, speeds: Speeds, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._speeds = speeds
        self._own = self._random.lognormal(0, speeds.spread, ranks)
        self._slow = self._random.random(ranks) < speeds.throttled

    def next(self) -> tuple[Floats, Floats]:
        """Of this step: as the ranks are, and with what differs from step to step."""
        speeds, random = self._speeds, self._random
        ends = random.random(len(self._slow)) < 1 / speeds.throttled_steps
        begin = speeds.throttled / (1 - speeds.throttled) / speeds.throttled_steps
        begins = random.random(len(self._slow)) < begin
        self._slow = np.where(self._slow, ~ends, begins)
        usual = self._own * np.where(self._slow, speeds.throttled_times, 1.0)
        return usual, usual * random.lognormal(0, speeds.jitter, len(usual))


def step_efficiency(
    ranks: int, speeds: Speeds, seed: int, lag: int = LAG, steps: int = STEPS
) -> tuple[float, float]:
    """Perfectly divisible work over what steps took: with even shares, and with those of the rule."""
    rows = ROWS_PER_RANK * ranks
    sampler = _C._GlobalSampler(
        size=rows,
        batch_size=rows,
        rank=0,
        world_size=ranks,
        shuffle=False,
        seed=0,
        drop_last=False,
        lag=lag,
        min_rows=1,
        max_rows=[],
    )
    times = RowTimes(ranks, speeds, seed)
    ideal = even = shared = 0.0
    for _ in range(steps):
        usual, now = times.next()
        sampler.reset()
        sampler.next()
        work = np.asarray(sampler.shares()) * now
        sampler.note(work.tolist())
        ideal += rows / float(np.sum(1 / usual))
        even += ROWS_PER_RANK * float(now.max())
        shared += float(work.max())
    return ideal / even, ideal / shared


def goodput_of_restarts(ranks: int, failures: Failures, random: np.random.Generator) -> float:
    """Time in steps that are kept, over all time, where each failure begins all ranks again from the checkpoint."""
    every = failures.checkpoint_every_s(ranks)
    end, now, kept = failures.days * 86400, 0.0, 0.0
    while now < end:
        until = float(random.exponential(1 / failures.failures_per_s(ranks)))
        if now + until >= end:  # what is done at the end is kept
            kept += (end - now) * every / (every + failures.checkpoint_s)
            return kept / end
        kept += every * (until // (every + failures.checkpoint_s))
        now += until + failures.detect_s + failures.restart_s
    return kept / now


def goodput_of_regroups(
    ranks: int, failures: Failures, uneven_s: float, random: np.random.Generator
) -> float:
    """The same where survivors go on without what died, which is replaced later; only without any all begin again.

    The checkpoints are the same ones. `uneven_s`: what is lost until shares, which begin even, have settled again.
    """
    every = failures.checkpoint_every_s(ranks)
    end, now, kept, unsaved = failures.days * 86400, 0.0, 0.0, 0.0
    busy = every / (every + failures.checkpoint_s)
    back: list[tuple[float, int]] = []  # when, and how many ranks
    while now < end:
        away = sum(count for _, count in back)
        next_failure = now + float(
            random.exponential(1 / failures.failures_per_s(max(ranks - away, 1)))
        )
        next_back = min((when for when, _ in back), default=math.inf)
        until = min(next_failure, next_back, end)
        gained = (until - now) * busy * (ranks - away) / ranks
        kept, unsaved = kept + gained, min(unsaved + gained, every)
        now = until
        if now == end:
            break
        if next_back <= next_failure:
            back.remove(min(back))
            now += failures.heal_s + uneven_s
            continue
        host = random.random() < failures.host_share
        died = min(failures.ranks_of_a_host if host else 1, ranks - away)
        if died == ranks - away:  # nobody survives
            kept -= unsaved * float(random.random())
            now += failures.detect_s + failures.restart_s
            back, unsaved = [], 0.0
            continue
        now += failures.detect_s + failures.heal_s + uneven_s
        now += failures.step_s  # that was under way
        back.append((now + failures.away_s, died))
    return kept / now


@dataclass(frozen=True)
class Row:
    """Fractions of perfectly divisible work on ranks that never die."""

    ranks: int
    even: float
    shares: float
    even_restart: float
    shares_restart: float
    shares_regroup: float
    failures_a_day: float


def simulate(ranks: int, speeds: Speeds, failures: Failures, steps: int = STEPS) -> Row:
    """Means over the seeds."""
    seeds = max(SEEDS, 1000 // ranks)
    found = np.array([step_efficiency(ranks, speeds, seed, steps=steps) for seed in range(seeds)])
    even, shares = (float(mean) for mean in found.mean(axis=0))
    random = np.random.default_rng(0)
    runs = range(10 * seeds)
    restart = float(np.mean([goodput_of_restarts(ranks, failures, random) for _ in runs]))
    uneven_s = (LAG + 3) * failures.step_s * (shares / even - 1)
    regroup = float(np.mean([goodput_of_regroups(ranks, failures, uneven_s, random) for _ in runs]))
    return Row(
        ranks,
        even,
        shares,
        even * restart,
        shares * restart,
        shares * regroup,
        86400 * failures.failures_per_s(ranks),
    )


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [
        "| ranks | failures a day | even | shares | even, restart | shares, restart | shares, regroup |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        shown = (row.even, row.shares, row.even_restart, row.shares_restart, row.shares_regroup)
        values = " | ".join(f"{value:.3f}" for value in shown)
        lines.append(f"| {row.ranks:,} | {row.failures_a_day:.2f} | {values} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mtbf-h", type=float, action="append", help="of a rank; several tables")
    parser.add_argument("--heal-s", type=float, default=Failures.heal_s)
    parser.add_argument("--detect-s", type=float, default=Failures.detect_s)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    given = parser.parse_args()
    for mtbf_h in given.mtbf_h or [Failures.mtbf_h, 8_000.0]:
        failures = Failures(mtbf_h=mtbf_h, heal_s=given.heal_s, detect_s=given.detect_s)
        print(f"\n{Speeds()}\n{failures}\n")
        print(table([simulate(ranks, Speeds(), failures) for ranks in given.ranks]))


if __name__ == "__main__":
    main()
