"""All figures of the ladder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.ladder import best, exact, idle, largest, peers, predict, state, sweep

MODULES = (largest, exact, predict, best, peers, sweep, idle, state)


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    yield from common.figures_of(MODULES, quick, only)
