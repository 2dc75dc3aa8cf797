"""What the live table with sites adds to a step of training: CPU time with it, against without it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

import brimful
from benchmarks import callgrind, common, intervals
from benchmarks.sizer import overhead
from brimful.memory import _tracking

IDS = ("probes.cost_cnn", "probes.cost_transformer", "probes.cost_tiny")
ROUNDS, QUICK_ROUNDS = 60, 3
PEER_ROUNDS, QUICK_PEER_ROUNDS = 10, 2
WARM_UP_STEPS = 2
#: Steps of a round: enough for the clock, few enough for both ways to meet the same machine.
STEPS = {"cnn": 4, "transformer": 3, "tiny": 400}
#: Of these in one run of callgrind, fifty times slower.
COUNTED_STEPS = {"cnn": 2, "transformer": 2, "tiny": 50}
COUNTED_LIBRARY = "brimful_bench_counted.so"
PARTS = {
    "births": ["brimful::memory::BudgetAllocator::allocate"],
    "deaths": ["brimful::memory::BudgetAllocator::release"],
}
WITHOUT, AGAIN, WITH, PEER = "without", "without again", "with", "MemTracker"
RECORDED, BY_MODULE = "recorded", "by module"

Batch = tuple[torch.Tensor, torch.Tensor]


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "cnn": (overhead.Cnn, lambda: (torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))),
    "transformer": (
        overhead.Encoder,
        lambda: (torch.randint(200, (16, 32)), torch.randint(10, (16,))),
    ),
    "tiny": (_tiny, lambda: (torch.randn(8, 16), torch.randint(4, (8,)))),
}


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields a figure for each model."""
    for figure_id, (name, (make, batch)) in zip(IDS, MODELS.items(), strict=True):
        yield _measure(figure_id, name, make, batch, quick)


def _measure(
    figure_id: str,
    name: str,
    make: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    quick: bool,
) -> common.Figure:
    torch.manual_seed(0)
    model = make()
    step = step_of(model, batch)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    cpu = _rounds(
        step,
        STEPS[name],
        rounds,
        {
            WITHOUT: nullcontext,
            WITH: brimful.memory.track,
            RECORDED: _recorded,
            BY_MODULE: by_module,
            AGAIN: nullcontext,
        },
    )
    above = intervals.median_ratio(cpu[WITH], cpu[WITHOUT])
    found = intervals.Interval(above.value - 1, above.low - 1, above.high - 1)
    conditions = common.machine_conditions()
    conditions.update(
        model=name,
        world_size=1,
        value="CPU time of a step with brimful.memory.track() / without - 1",
        steps_a_round=STEPS[name],
        step_s=intervals.median(cpu[WITHOUT]) / STEPS[name],
        births_a_step=_births(step),
        cpu_time=common.interval_dict(found),
        recorded=common.interval_dict(intervals.median_ratio(cpu[RECORDED], cpu[WITH])),
        by_module=common.interval_dict(intervals.median_ratio(cpu[BY_MODULE], cpu[WITH])),
        cpu_time_a_a=common.interval_dict(intervals.median_ratio(cpu[AGAIN], cpu[WITHOUT])),
        peers=_peer(model, step, name, QUICK_PEER_ROUNDS if quick else PEER_ROUNDS),
        instructions={} if quick else _instructions(name),
    )
    print(f"\n{figure_id}: {found.value:+.2%} [{found.low:+.2%}, {found.high:+.2%}], {conditions}")
    return common.Figure(
        figure_id, "fraction", found.value, found.low, found.high, WITHOUT, rounds, conditions
    )


def step_of(model: nn.Module, batch: Callable[[], Batch]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        x, wanted = batch()
        F.cross_entropy(model(x), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _rounds(
    step: Callable[[], None],
    steps: int,
    rounds: int,
    ways: dict[str, Callable[[], AbstractContextManager[Any]]],
) -> dict[str, list[float]]:
    """CPU seconds of each round of each way; the ways take turns, forwards and backwards."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, rounds):
        for way in reversed(ways) if number % 2 else ways:
            with ways[way]():
                for _ in range(WARM_UP_STEPS):
                    step()
                began = time.process_time()
                for _ in range(steps):
                    step()
                taken = time.process_time() - began
            if number >= 0:
                seconds[way].append(taken)
    return seconds


@contextmanager
def _recorded() -> Iterator[None]:
    brimful.memory.start_recording()
    try:
        yield
    finally:
        brimful.memory.stop_recording(models=(), optimizers=())


@contextmanager
def by_module() -> Iterator[None]:
    """With the hooks of `brimful run`, which name each module."""
    _tracking.start(None, None, every_module=True)
    try:
        yield
    finally:
        brimful.memory.stop_tracking()


def _instructions(name: str) -> dict[str, Any]:
    """Of a step, all of it and what the allocator is called for: without and with tracking."""
    steps = COUNTED_STEPS[name]
    try:
        callgrind.find_program(COUNTED_LIBRARY)
        profiles = {
            way: callgrind.profile(
                Path(sys.executable), "-m", "benchmarks.probes.counted", name, way, str(steps)
            )
            for way in (WITHOUT, WITH, BY_MODULE)
        }
    except callgrind.Unavailable as error:
        return {"unavailable": str(error)}
    counts = {
        way: {
            "step": callgrind.total(text) / steps,
            **{part: callgrind.inclusive(text, names) / steps for part, names in PARTS.items()},
        }
        for way, text in profiles.items()
    }
    return {
        **counts,
        "above": counts[WITH]["step"] / counts[WITHOUT]["step"] - 1,
        "by_module_above": counts[BY_MODULE]["step"] / counts[WITH]["step"] - 1,
    }


def _births(step: Callable[[], None]) -> int:
    with brimful.memory.track():
        step()
        return brimful.memory.tracking_counts().births


def _peer(model: nn.Module, step: Callable[[], None], name: str, rounds: int) -> dict[str, Any]:
    """The same of torch's MemTracker: categories and modules, but no lines."""

    def tracker() -> MemTracker:
        made = MemTracker()
        made.track_external(model)
        return made

    def one_step() -> None:
        step()
        if trackers:
            trackers[-1].reset_mod_stats()  # without it the second step raises

    trackers: list[MemTracker] = []

    class Tracked:
        def __enter__(self) -> None:
            trackers.append(tracker())
            trackers[-1].__enter__()

        def __exit__(self, *error: Any) -> None:
            trackers.pop().__exit__(*error)

    try:
        cpu = _rounds(
            one_step, max(1, STEPS[name] // 20), rounds, {WITHOUT: nullcontext, PEER: Tracked}
        )
    except Exception as error:  # it is not our code that failed: say so beside the figure
        return {PEER: f"failed: {type(error).__name__}: {error}"}
    finally:
        common.collect_all()
    ratio = intervals.median_ratio(cpu[PEER], cpu[WITHOUT])
    return {PEER: {"above": ratio.value - 1, "low": ratio.low - 1, "high": ratio.high - 1}}
