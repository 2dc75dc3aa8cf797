"""Kernels of brimful's own: there are none, so nothing is to be compared."""

from __future__ import annotations

from collections.abc import Iterator

from tools.gpu.catalogue import ROOT
from tools.gpu.check import Check, skipped


def run(small: bool) -> Iterator[Check]:
    """Fails once there is a kernel and no comparison."""
    kernels = [path.name for path in (ROOT / "csrc").rglob("*.cu*")]
    if kernels:
        yield Check("kernels", "bad", f"not compared with their fallbacks: {', '.join(kernels)}")
    else:
        yield skipped("kernels", "brimful has no kernels of its own; torch's are called")
