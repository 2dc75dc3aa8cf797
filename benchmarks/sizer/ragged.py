"""Shuffled sequence lengths under one limit: how full the memory is, and how many pieces that takes."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import common
from benchmarks.sizer import models

IDS = ("sizer.ragged_fill", "sizer.ragged_pieces")
LENGTHS = range(16, 513)
QUICK_LENGTHS = range(16, 65)
ROWS = 128
FITTING = 4.2  # rows of the longest that the room takes
STEPS = 120
QUICK_STEPS = 8


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the mean of peak over room, and our pieces beside those of one size that fits the longest."""
    import brimful

    lengths = QUICK_LENGTHS if quick else LENGTHS
    order = list(lengths)
    random.Random(0).shuffle(order)
    order = order[: QUICK_STEPS if quick else STEPS]
    torch.manual_seed(0)
    model = models.Transformer(causal=True)
    room = int(FITTING * _bytes_per_row(brimful, model, lengths[-1]))
    ours = _train(brimful, model, order, room)
    at_longest = int(FITTING)
    fixed = _train(brimful, model, order, room, rows=at_longest)
    fill = sum(ours["fills"]) / len(order)
    conditions = common.machine_conditions()
    conditions.update(
        steps=len(order),
        rows=ROWS,
        room_bytes=room,
        lengths=[lengths[0], lengths[-1]],
        fixed_rows=at_longest,
        refused=ours["ooms"],
        rehearsed_lengths=ours["rehearsed"],
        tokens_per_s={"ours": ours["tokens_per_s"], "fixed": fixed["tokens_per_s"]},
        pieces={"ours": ours["pieces"], "fixed": fixed["pieces"]},
        least_fill=min(ours["fills"]),
    )
    print(
        f"\nsizer.ragged: {ours['ooms']} refused, {ours['rehearsed']} lengths rehearsed, "
        f"{ours['tokens_per_s']:.0f} tokens/s, one size: {fixed['tokens_per_s']:.0f} tokens/s"
    )
    if ours["ooms"]:
        for figure_id in IDS:
            yield common.unmeasured(figure_id, f"allocations were refused ({ours['ooms']})")
        return
    pieces = ours["pieces"] / fixed["pieces"]
    for figure_id, value in zip(IDS, (fill, pieces), strict=True):
        yield common.Figure(
            figure_id,
            "fraction",
            value,
            value,
            value,
            rounds=len(order),
            conditions=conditions,
        )


def _batch(length: int) -> torch.Tensor:
    return models.ragged(ROWS, length, length // 2)


def _bytes_per_row(brimful: Any, model: torch.nn.Module, length: int) -> int:
    sizer = brimful.BatchSizer(model)
    peaks = []
    for rows in (2, 2, 3):
        gc.collect()
        batch = _batch(length)[:rows]
        before = brimful.memory.stats("cpu").used_bytes
        peaks.append(sizer.step(batch, models.loss).peak_bytes - before)
        model.zero_grad()
    return int(peaks[2] - peaks[1])


def _train(
    brimful: Any, model: torch.nn.Module, order: list[int], room: int, rows: int | None = None
) -> dict[str, Any]:
    """Trains a step for each length; `rows`: of all pieces, where they are not chosen by the sizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sizer = brimful.BatchSizer(model, predict=rows is None)
    split = None if rows is None else _split(rows)
    calls = 0

    def loss(model: torch.nn.Module, piece: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return models.loss(model, piece)

    fills, pieces, rehearsed, tokens, seconds = [], 0, 0, 0, 0.0
    ooms = brimful.memory.stats("cpu").ooms
    for length in order:
        batch = _batch(length)
        gc.collect()
        before = brimful.memory.stats("cpu").used_bytes
        brimful.memory.set_limit("cpu", before + room)
        calls, began = 0, time.perf_counter()
        try:
            outcome = sizer.step(batch, loss, split=split)
        finally:
            brimful.memory.set_limit("cpu", None)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - began
        tokens += batch.numel()
        fills.append((outcome.peak_bytes - before) / room)
        pieces += outcome.pieces
        rehearsed += calls > outcome.pieces
    return {
        "ooms": brimful.memory.stats("cpu").ooms - ooms,
        "fills": fills,
        "pieces": pieces,
        "rehearsed": rehearsed,
        "tokens_per_s": tokens / seconds,
    }


def _split(rows: int) -> list[int]:
    return [min(rows, ROWS - begin) for begin in range(0, ROWS, rows)]
