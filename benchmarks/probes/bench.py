"""All figures of the memory probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.probes import (
    categories,
    cost,
    errors,
    import_time,
    leaks,
    ooms,
    report,
    summary,
    unsited,
)

MODULES = (cost, unsited, categories, leaks, ooms, errors, summary, report, import_time)


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    yield from common.figures_of(MODULES, quick, only)
