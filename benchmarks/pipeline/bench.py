"""All figures of the pipeline."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

import torch

from benchmarks import common

#: Modules of this folder, with what each measures.
MODULES = {
    "actions": ("pipeline.action_cpp", "pipeline.action_python", "pipeline.trace"),
    "gloo": ("pipeline.action_gloo",),
    "bubble": ("pipeline.bubble_worst", "pipeline.live_bad"),
    "zb_tables": ("pipeline.zb_tables",),
    "matmul": ("pipeline.matmul_share",),
    "split": ("pipeline.split_live", "pipeline.split_time"),
    "turns": ("pipeline.turns", "pipeline.turns_checkpoint"),
}


def figures(quick: bool, only: Sequence[str] = (), **_: object) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    torch.set_num_threads(1)
    for name, ids in MODULES.items():
        if only and set(only).isdisjoint(ids):
            continue
        module = importlib.import_module(f"benchmarks.pipeline.{name}")
        for figure in module.figures(quick):
            if not only or figure.id in only:
                yield figure
