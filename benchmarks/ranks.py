"""Ranks as processes over gloo that import nothing beforehand, under a watchdog that ends a hang."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(
    str(Path(__file__).resolve().parent.parent / "tests" / "python")
)  # of the ranks too

import rank_processes


class RanksFailed(Exception):
    """A rank raised, died, or all of them made no progress for too long."""


RankFunction = Callable[..., Any]


def run_ranks(world_size: int, fn: RankFunction, *args: Any, stall_s: float) -> list[Any]:
    """Runs fn(rank, world_size, progress, *args) in `world_size` processes; returns their results.

    `progress()` is to be called at least every `stall_s` seconds; without a call from any rank for
    that long all are killed. Raises RanksFailed with the ranks' errors, in their own words.
    """
    try:
        results: list[Any] = rank_processes.run_ranks(
            _call,
            fn,
            *args,
            size=world_size,
            timeout_s=2 * stall_s,  # the watchdog is to fire first: it names the hang
            watchdog_s=stall_s,
            context=multiprocessing.get_context("spawn"),
        )
    except rank_processes.RanksFailed as error:
        print(error, file=sys.stderr)
        raised = {rank: _message(text) for rank, text in error.errors.items() if text is not None}
        said = [f"rank {rank}: {message}" for rank, message in raised.items()]
        hang = f"hang: no rank made progress for {stall_s:g} s; killed"
        raise RanksFailed("; ".join(said) or hang) from None
    return results


def _message(text: str) -> str:
    """What a traceback ends with."""
    return text.rpartition("\n  ")[2].partition("\n")[2].strip() or text


def _call(rank: rank_processes.Rank, fn: RankFunction, *args: Any) -> Any:
    return fn(rank.index, rank.size, rank.progress, *args)
