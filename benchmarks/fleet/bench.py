"""All figures of ranks that are not equally fast, or die."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.fleet import by_cost, heal, idle, metrics, record, settle, slow_rank, torchft

MODULES = (slow_rank, settle, by_cost, heal, idle, metrics, record, torchft)


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    yield from common.figures_of(MODULES, quick, only)
