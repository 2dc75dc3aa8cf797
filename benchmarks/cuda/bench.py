"""All figures of CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.cuda import calls, checks, replay, suites

MODULES = (checks, suites, replay, calls)


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    yield from common.figures_of(MODULES, quick, only)
