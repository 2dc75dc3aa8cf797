"""What the sizer adds to a step that fits, against the same step by hand: instructions, and time from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import callgrind, common, intervals

IDS = ("sizer.overhead",)
PROGRAM = "brimful_bench_sizer_instructions"
MODELS = ("cnn", "encoder")
HAND, SIZER = "hand", "sizer"
WARM_UP_STEPS = 3
STEPS, QUICK_STEPS = 5, 1
ROUNDS, QUICK_ROUNDS = 60, 3
#: Parts of a step of the sizer, by the functions that begin so.
PARTS = {
    "transaction": ("brimful::Transaction::",),
    "memory statistics": ("brimful::memory::stats(", "brimful::memory::PeakScope::"),
    "empty gradients": ("brimful::StepGroup::require_empty_gradients(",),
    "accept": ("brimful::StepGroup::accept(",),
    "splitting": ("brimful::slice_rows(", "brimful::split_rows(", "brimful::rows_of("),
    "history": ("brimful::PieceHistory::",),
    "records": ("brimful::StepGroup::launch(", "brimful::StepGroup::finish("),
}


class Cnn(nn.Module):
    """That of examples/train_fashion_mnist.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        out: torch.Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


class Encoder(nn.Module):
    """Of the width, depth and batch of instructions.cpp."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 128)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(4)
            )
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.words(x)).mean(1))
        return out


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the larger fraction of the two models; a count has no interval, and one round is enough."""
    steps = QUICK_STEPS if quick else STEPS
    conditions = common.machine_conditions()
    conditions.update(
        models=MODELS,
        world_size=1,
        value="(instructions of a step of the sizer - by hand) / by hand, in C++",
        warm_up_steps=WARM_UP_STEPS,
        steps=steps,
    )
    try:
        program = callgrind.find_program(PROGRAM)
        profiles = {
            (model, mode): callgrind.profile(program, model, mode, str(WARM_UP_STEPS), str(steps))
            for model in MODELS
            for mode in (HAND, SIZER)
        }
    except callgrind.Unavailable as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    conditions["python"] = _in_python(QUICK_ROUNDS if quick else ROUNDS)
    yield evaluate(profiles, steps, conditions)


def evaluate(
    profiles: dict[tuple[str, str], str], steps: int, conditions: dict[str, Any]
) -> common.Figure:
    """Returns the figure of the profiles by model and mode."""
    above: dict[str, float] = {}
    for model in MODELS:
        counts = {mode: callgrind.total(profiles[model, mode]) / steps for mode in (HAND, SIZER)}
        above[model] = counts[SIZER] / counts[HAND] - 1
        parts = {
            name: callgrind.inclusive(profiles[model, SIZER], prefixes) / steps
            for name, prefixes in PARTS.items()
        }
        conditions[model] = {
            "step_instructions": counts,
            "above_hand": above[model],
            "parts_instructions": parts,
        }
        print(f"\nsizer.overhead: {model}, instructions of a step")
        for words, count in {**counts, **parts}.items():
            print(f"  {words:20s} {count:14,.0f}")
        print(f"  {'above hand':20s} {above[model]:14.3%}")
    worst = max(above.values())
    return common.Figure(
        IDS[0], "fraction", worst, worst, worst, HAND, rounds=1, conditions=conditions
    )


def _in_python(rounds: int) -> dict[str, Any]:
    """The same in Python: medians over rounds of time, and CPU time, of a step to that by hand."""
    batches = {
        "cnn": (torch.randn(64, 1, 28, 28), torch.randint(10, (64,))),
        "encoder": (torch.randint(200, (16, 32)), torch.randint(10, (16,))),
    }
    found: dict[str, Any] = {}
    for name, make in {"cnn": Cnn, "encoder": Encoder}.items():
        torch.manual_seed(0)
        model = make()
        ways = {HAND: _by_hand(model, batches[name]), SIZER: _by_sizer(model, batches[name])}
        wall: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(-WARM_UP_STEPS, rounds):
            for way in (HAND, SIZER) if number % 2 else (SIZER, HAND):
                began = time.perf_counter(), time.process_time()
                ways[way]()
                if number >= 0:
                    wall[way].append(time.perf_counter() - began[0])
                    cpu[way].append(time.process_time() - began[1])
        found[name] = {
            "wall_ratio": common.interval_dict(intervals.median_ratio(wall[SIZER], wall[HAND])),
            "cpu_ratio": common.interval_dict(intervals.median_ratio(cpu[SIZER], cpu[HAND])),
            "step_s": intervals.median(wall[HAND]),
        }
        print(f"  in Python, {name}: {found[name]}")
    return found


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _by_hand(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _by_sizer(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    import brimful

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sizer = brimful.BatchSizer(model, optimizer, predict=False)

    def step() -> None:
        sizer.step(batch, _loss)
        optimizer.step()
        optimizer.zero_grad()

    return step
