"""The memory and the time of a contrastive batch in pieces, beside the same batch whole and as others split it."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import brimful
from benchmarks import common, intervals
from benchmarks.rows import ways

IDS = ("rows.pairs_memory", "rows.pairs_time")
PIECE_ROWS, QUICK_PIECE_ROWS = 16, 1
TIMES = 64
TIMED_PIECES = 8
ROUNDS, QUICK_ROUNDS = 15, 2
OURS, WHOLE = "brimful", "whole"
Way = Callable[..., None]


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the figure of memory, then that of time."""
    rows = QUICK_PIECE_ROWS if quick else PIECE_ROWS
    yield memory_figure(rows)
    yield time_figure(rows, QUICK_ROUNDS if quick else ROUNDS)


def split_ways(model: ways.Encoder) -> dict[str, Way]:
    made: dict[str, Way | None] = {
        OURS: ways.pair_step(model),
        "sentence-transformers": ways.sentence_transformers(model),
        "open_clip": ways.open_clip,
    }
    return {name: way for name, way in made.items() if way is not None}


def gradients_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def peak_of(way: Way, model: ways.Encoder, batch: ways.Batch, rows: int) -> int:
    """Bytes of tensors at the fullest moment, beyond parameters and batch."""
    model.zero_grad()
    common.collect_all()
    before = brimful.memory.stats("cpu").used_bytes
    brimful.memory.reset_peak("cpu")
    way(model, batch, rows)
    return brimful.memory.stats("cpu").peak_bytes - before


def memory_figure(rows: int) -> common.Figure:
    """The peak of a batch of 64 pieces, without its embeddings, over that of a batch of one."""
    model = ways.Encoder()
    large, small = ways.draw(TIMES * rows), ways.draw(rows)
    embeddings = 2 * len(large[0]) * ways.EMBEDDING * 4
    peaks, errors = {}, {}
    exact = ways.Encoder().double()
    ways.open_clip(exact, large, rows)  # in float64, where the order of sums is of no account
    reference = gradients_of(exact)

    def error_of(model: ways.Encoder) -> float:
        difference = gradients_of(model) - reference
        return (difference.norm() / reference.norm()).item()

    peak_whole = peak_of(ways.whole, model, large, rows)
    errors[WHOLE] = error_of(model)
    for name, way in split_ways(model).items():
        model.zero_grad()
        way(model, small, rows)  # what is allocated once
        peaks[name] = [peak_of(way, model, small, rows), peak_of(way, model, large, rows)]
        errors[name] = error_of(model)
    one, many = peaks[OURS]
    value = (many - embeddings) / one
    conditions = conditions_of(rows)
    conditions.update(
        value="(peak of a batch of 64 pieces - bytes of its embeddings) / peak of a batch of one piece",
        pieces=TIMES,
        embedding_bytes=embeddings,
        peaks_of_one_and_64_pieces=peaks,
        peak_whole=peak_whole,
        gradient_bytes=reference.numel() * 4,
        gradient_error_against_float64=errors,
    )
    return common.Figure(
        IDS[0], "ratio", value, value, value, "a batch of one piece", 1, conditions
    )


def time_figure(rows: int, rounds: int) -> common.Figure:
    """A step in eight pieces over the same batch whole."""
    model = ways.Encoder()
    batch = ways.draw(TIMED_PIECES * rows)
    cases: dict[str, Way] = {WHOLE: ways.whole, **split_ways(model)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-2, rounds):
        order = list(cases)[:: -1 if number % 2 else 1]
        for name in order:
            model.zero_grad()
            began = time.perf_counter()
            cases[name](model, batch, rows)
            if number >= 0:
                times[name].append(time.perf_counter() - began)
    ratio = intervals.median_ratio(times[OURS], times[WHOLE])
    conditions = conditions_of(rows)
    conditions.update(
        pieces=TIMED_PIECES,
        ratios={
            name: common.interval_dict(intervals.median_ratio(taken, times[WHOLE]))
            for name, taken in times.items()
        },
        median_s={name: intervals.median(taken) for name, taken in times.items()},
    )
    return common.Figure(
        IDS[1], "ratio", ratio.value, ratio.low, ratio.high, "the batch whole", rounds, conditions
    )


def conditions_of(rows: int) -> dict[str, Any]:
    conditions = common.machine_conditions()
    try:
        version = importlib.metadata.version("sentence-transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    conditions.update(piece_rows=rows, tokens=ways.TOKENS, sentence_transformers=version)
    return conditions
