"""Two ranks over gloo on one device: their gradients, and a shortage of one of them."""

from __future__ import annotations

from collections.abc import Iterator

from tools.gpu import two_ranks
from tools.gpu.check import Check


def run(small: bool) -> Iterator[Check]:
    """Yields the checks of two ranks."""
    yield from two_ranks.compare("gloo", has_own_device=False)
