"""What shares, a stop that no rank asks for and metrics that are off add to a healthy step: instructions and calls."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import callgrind, common, ranks
from benchmarks.fleet import counted

IDS = ("fleet.idle", "fleet.idle_calls")
STEPS, QUICK_STEPS = 10, 1
#: Of a step with all of it and of one without: what the core does for a stop in every step.
STOP = ("brimful::stop_to_send", "brimful::learn_stop", "brimful::stops")
RANK_STEPS = 10
STALL_S = 60.0


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the fraction of instructions, by callgrind, and the calls and bytes that two ranks make more."""
    yield _calls()
    steps = QUICK_STEPS if quick else STEPS
    conditions = {**common.machine_conditions(), "model": "cnn", "shares_of_ranks": counted.RANKS}
    try:
        callgrind.find_program(counted.LIBRARY)
        texts = {
            way: callgrind.profile(
                Path(sys.executable), "-m", "benchmarks.fleet.counted", way, str(steps), late=True
            )
            for way in (counted.PLAIN, counted.FLEET)
        }
    except callgrind.Unavailable as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    totals = {way: callgrind.total(text) / steps for way, text in texts.items()}
    stop = callgrind.inclusive(texts[counted.FLEET], STOP) / steps
    rule = callgrind.inclusive(texts[counted.FLEET], ["brimful::launch::note_step"]) / steps
    conditions.update(step_instructions=totals, stop_instructions=stop, rule_instructions=rule)
    value = (totals[counted.FLEET] + stop) / totals[counted.PLAIN] - 1
    yield common.Figure(
        IDS[0], "fraction", value, value, value, counted.PLAIN, rounds=1, conditions=conditions
    )


def _calls() -> common.Figure:
    conditions = {**common.machine_conditions(), "world_size": 2, "steps": RANK_STEPS}
    try:
        seen = {
            way: ranks.run_ranks(2, _rank, way, stall_s=STALL_S)[0]
            for way in (counted.PLAIN, counted.FLEET)
        }
    except ranks.RanksFailed as error:
        return common.unmeasured(IDS[1], str(error), conditions=conditions)
    conditions.update(launches_exchanges_bytes=seen)
    more = sum(abs(b - a) for a, b in zip(*seen.values(), strict=True))
    return common.Figure(
        IDS[1], "count", more, more, more, rounds=RANK_STEPS, conditions=conditions
    )


def _rank(
    rank: int, world_size: int, progress: Callable[[], None], way: str
) -> tuple[int, int, int]:
    """Collectives of buckets, other ones, and bytes of some steps."""
    import torch
    from torch.utils.data import DataLoader

    import brimful

    torch.manual_seed(0)
    rows = 64 * world_size
    data = torch.randn(rows * RANK_STEPS, 8)
    model = brimful.DistributedDataParallel(torch.nn.Linear(8, 8))
    sizer = brimful.BatchSizer(model)
    loader: Any = [data[rank * 64 :][:64]] * RANK_STEPS
    if way == counted.FLEET:
        brimful.stop_on(signal.SIGUSR1)
        sampler = brimful.GlobalSampler(len(data), batch_size=rows)
        loader = DataLoader(data, batch_sampler=sampler)  # type: ignore[arg-type]
    bytes = 0
    for batch in sizer.batches(loader):
        sizer.step(batch, lambda m, piece: m(piece).square().mean())
        bytes += model.telemetry()["bytes"]
        model.zero_grad()
        progress()
    counters = model.reducer.counters
    return counters.launches, counters.exchanges, bytes
