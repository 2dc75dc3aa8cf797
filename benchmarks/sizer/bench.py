"""All figures of the sizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks import common
from benchmarks.sizer import overhead, peers, predict, ragged, regrow, steady, sweep, sweep_ranks

MODULES = (predict, steady, ragged, sweep, sweep_ranks, overhead, regrow, peers)


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    torch.set_num_threads(1)
    for module in MODULES:
        if not only or not set(only).isdisjoint(module.IDS):
            for figure in module.measure(quick):
                if not only or figure.id in only:
                    yield figure
