"""All figures of models that fully_shard has sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.sharded import faults, steps, unlike

MODULES = (unlike, steps, faults)


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    yield from common.figures_of(MODULES, quick, only)
