"""Medians over interleaved rounds, and their 95 % bootstrap intervals.

The rounds are the sample. All cases of a round ran within moments of each other, so a resample
draws whole rounds: what slows a round down slows all its cases and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 4000
SEED = 20
LEVEL = 0.95


class NotResolved(Exception):
    """A ratio whose denominator may be zero."""


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; low <= value <= high."""

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> float:
    """Returns the median. Raises ValueError for no values."""
    if not values:
        raise ValueError("a median needs values (values: 0)")
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def median_ratio(ours: Sequence[float], peer: Sequence[float]) -> Interval:
    """Returns the median over rounds of ours / peer."""
    a, b = _paired(ours, peer)
    if not bool((b > 0).all()):
        raise NotResolved("the peer's time is not above zero in every round")
    return _bootstrap(lambda rows: _median(rows[..., 0]), (a / b).unsqueeze(-1))


def overhead_ratio(ours: Sequence[float], peer: Sequence[float], bare: Sequence[float]) -> Interval:
    """Returns median(ours - bare) / median(peer - bare), differences taken within a round.

    Raises NotResolved where the peer's overhead may be zero in these rounds: the
    ratio would have no bounded interval.
    """
    a, b, base = _paired(ours, peer, bare)
    return _bootstrap(_ratio_of_medians, torch.stack((a - base, b - base), dim=-1))


def _ratio_of_medians(rows: torch.Tensor) -> torch.Tensor:
    above, below = _median(rows[..., 0]), _median(rows[..., 1])
    return torch.where(below > 0, above / below, torch.inf)


def _paired(*columns: Sequence[float]) -> list[torch.Tensor]:
    if not columns[0] or len({len(column) for column in columns}) != 1:
        raise ValueError(f"rounds must pair up (rounds: {[len(c) for c in columns]})")
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def _median(values: torch.Tensor) -> torch.Tensor:
    return values.quantile(0.5, dim=-1)


def _resample(rows: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    picks = torch.randint(len(rows), (RESAMPLES, len(rows)), generator=generator)
    return rows[picks]


def _bootstrap(statistic: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> Interval:
    value = float(statistic(rows))
    tail = (1 - LEVEL) / 2
    ends = statistic(_resample(rows)).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
    low, high = float(ends[0]), float(ends[1])
    if not (math.isfinite(value) and math.isfinite(low) and math.isfinite(high)):
        raise NotResolved("the peer's overhead over the bare module is not above the noise")
    return Interval(value, min(low, value), max(high, value))
