"""The optimizer's state elsewhere: bytes that stay on the device after a step, over those without."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import nn

import brimful
from benchmarks import common

IDS = ("ladder.state_room",)
WIDTH, QUICK_WIDTH, LAYERS = 1024, 256, 4
LADDERS = {"split": "split", "state": ["split", "state"]}


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the ratio, which is exact: bytes are the same in every run."""
    width = QUICK_WIDTH if quick else WIDTH
    # A limit below parameters, gradients and state is refused while nothing else is in use.
    filler = torch.empty(96 << 20, dtype=torch.uint8)
    stays = {name: _bytes_that_stay(ladder, width) for name, ladder in LADDERS.items()}
    value = stays["state"] / stays["split"]
    conditions = common.machine_conditions()
    conditions.update(
        value="bytes in use after Adam's first step with its state in a file / without",
        model=f"{LAYERS} linear layers of {width} x {width}",
        bytes=stays,
        beside=filler.nbytes,
    )
    yield common.Figure(
        IDS[0], "ratio", value, value, value, "split", rounds=1, conditions=conditions
    )


def _bytes_that_stay(ladder: str | list[str], width: int) -> int:
    before = _used()
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer, ladder=ladder)
    inputs = torch.randn(2, width)
    if ladder != "split":
        room = sum(p.nbytes for p in model.parameters()) + (1 << 20)
        brimful.memory.set_limit("cpu", _used() + room)
    try:
        sizer.step(inputs, lambda model, piece: model(piece).square().mean())
        optimizer.step()
    finally:
        brimful.memory.set_limit("cpu", None)
    return _used() - before


def _used() -> int:
    gc.collect()
    return brimful.memory.stats("cpu").used_bytes
