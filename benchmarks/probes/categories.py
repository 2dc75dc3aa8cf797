"""The peak by category: does it add up to the allocator's, and is it what one counts by hand?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

import brimful
from benchmarks import common
from benchmarks.sizer import models

IDS = ("probes.category_bad",)
MODELS = (
    "MLP",
    "conv + BN",
    "ResNet",
    "U-Net",
    "encoder",
    "LSTM",
    "checkpointed",
    "in-place ReLU",
)
STEPS = 3
FLOAT = 4


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields how many of the models' sums and of the categories counted by hand are wrong."""
    bad: list[str] = []
    conditions = common.machine_conditions()
    for name in MODELS:
        common.collect_all()  # what the model before left behind would be counted as other
        case = models.CASES[name]
        torch.manual_seed(0)
        model = case.make()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        x = case.batch(8 if quick else 64)
        step = _step(model, optimizer, x)
        found, peak_bytes = _peak(step, model, optimizer)
        if sum(found.values()) != peak_bytes:
            bad.append(f"{name}: {sum(found.values())} instead of {peak_bytes}")
        conditions[name] = {
            "peak_bytes": peak_bytes,
            "by_category": found,
            **_peer(model, optimizer, x),
        }
        print(f"\nprobes.category_bad: {name}: {conditions[name]}")
    found, wanted = _small()
    bad += [
        f"by hand: {category}: {found[category]} instead of {wanted[category]}"
        for category in wanted
        if found[category] != wanted[category]
    ]
    conditions.update(
        bad=bad, by_hand=wanted, models=MODELS, value="sums and categories that are wrong"
    )
    print(f"\nprobes.category_bad: {len(bad)} {bad}")
    common.collect_all()
    count = float(len(bad))
    yield common.Figure(IDS[0], "count", count, count, count, None, rounds=1, conditions=conditions)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> Callable[[], None]:
    def step() -> None:
        models.loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _peak(
    step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, int], int]:
    """The categories, and the allocator's own peak, of some steps."""
    brimful.memory.reset_peak("cpu")
    with brimful.memory.track():
        for _ in range(STEPS):
            step()
        peak = brimful.memory.peak_by_category(models=model, optimizers=optimizer)
        return peak.by_category, brimful.memory.stats("cpu").peak_bytes


def _small() -> tuple[dict[str, int], dict[str, int]]:
    """A step whose every byte is counted by hand.

    batch (4 x 64) @ weight (64 x 8) = y (4 x 8); loss = sum(y * y). The most is in use when the backward of the product
    holds the gradient of y, which nothing needs afterwards, and that of weight. y is gone by then; the loss and the
    gradient that backward begins with, one number each, were made before backward and are kept through it.
    """
    brimful.memory.reset_peak("cpu")
    before = brimful.memory.stats("cpu").used_bytes
    with brimful.memory.track():
        weight = nn.Parameter(torch.randn(64, 8))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        batch = torch.randn(4, 64)
        loss = (batch @ weight).square().sum()
        loss.backward()
        found = brimful.memory.peak_by_category(models=(), optimizers=optimizer).by_category
    wanted = dict.fromkeys(found, 0)
    wanted["parameters"] = wanted["gradients"] = 64 * 8 * FLOAT
    wanted["temporaries"] = 4 * 8 * FLOAT
    wanted["activations"] = 2 * FLOAT
    wanted["other"] = before + 4 * 64 * FLOAT
    return found, wanted


def _peer(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, Any]:
    """What torch's MemTracker says of the peak of one such step."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tracker = MemTracker()
            tracker.track_external(model, optimizer, x)
            with tracker:
                models.loss(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        [snapshot] = tracker.get_tracker_snapshot("peak").values()
    except Exception as error:  # it is not our code that failed: say so beside the figure
        return {"MemTracker": f"failed: {type(error).__name__}: {error}"}
    return {"MemTracker": {str(kind): int(size) for kind, size in snapshot.items()}}
