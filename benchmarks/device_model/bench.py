"""All figures of the device without arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.device_model import host_bytes, interval, operators, seconds, steps

MODULES = (steps, interval, seconds, host_bytes, operators)


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    yield from common.figures_of(MODULES, quick, only)
