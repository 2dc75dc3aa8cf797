"""All figures of the sizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.sizer import overhead, peers, predict, ragged, regrow, steady, sweep, sweep_ranks

MODULES = (predict, steady, ragged, sweep, sweep_ranks, overhead, regrow, peers)


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    yield from common.figures_of(MODULES, quick, only)
