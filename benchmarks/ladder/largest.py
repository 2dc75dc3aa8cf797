"""The largest single sample that trains under a limit: with the ladder, over that with splitting alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import common
from benchmarks.ladder import cases, plans
from benchmarks.sizer import models

IDS = ("ladder.largest_row", "ladder.largest_row_unet", "ladder.largest_row_lstm")
SPLIT = "split only"
STEPS = 3  # that must stand: one is recorded, the others follow a plan
MOST = 32  # times the size; nothing larger is tried
QUICK_MOST = 2
BESIDE_BYTES = 16384  # what a step takes beside its pieces


@dataclass(frozen=True)
class Growing:
    """`size` times `unit` is the sample that splitting alone has room for; MOST times as much is tried."""

    make: Callable[[], nn.Module]
    draw: Callable[[int, int], torch.Tensor]
    size: int
    unit: int  # sizes are multiples of it
    power: int = 1  # activations grow with this power of the size


class DeepRecurrent(nn.Module):
    """One layer takes all that it saves at once, so that two cannot give more than twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(32, 48, 4, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x)[0])
        return out


WAYS: dict[str, dict[str, Growing]] = {
    IDS[0]: {
        "decoder of 12": Growing(lambda: cases.Blocks(True), cases.CASES["encoder"].draw, 16, 16),
        "encoder of 12": Growing(lambda: cases.Blocks(False), cases.CASES["encoder"].draw, 16, 16),
    },
    IDS[1]: {"deep U-Net": Growing(cases.DeepUNet, cases.CASES["deep U-Net"].draw, 12, 8, 2)},
    IDS[2]: {
        "LSTM of 2 layers": Growing(models.Recurrent, cases.CASES["LSTM"].draw, 16, 32),
        "LSTM of 4 layers": Growing(DeepRecurrent, cases.CASES["LSTM"].draw, 16, 32),
    },
}


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields a figure for each kind of model: of several models the worst."""
    for figure_id, ways in WAYS.items():
        found = {name: _measure(way, QUICK_MOST if quick else MOST) for name, way in ways.items()}
        worst = min(found, key=lambda name: float(found[name]["ratio"]))
        conditions = common.machine_conditions()
        conditions.update(
            models=found,
            worst=worst,
            value="bytes in use behind the forward of the largest sample that trains, with / without",
            optimizer="SGD",
            steps=STEPS,
        )
        print(f"\n{figure_id}: {found}")
        ratio = found[worst]["ratio"]
        yield common.Figure(
            figure_id, "ratio", ratio, ratio, ratio, SPLIT, rounds=1, conditions=conditions
        )


def _measure(way: Growing, most: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = way.make()
    base = way.size * way.unit
    limit = _peak(model, way.draw(1, base)) + BESIDE_BYTES
    if _trains(model, way.draw(1, base), limit, "split") is None:
        raise RuntimeError(f"a sample does not train within its own peak (size: {base})")
    if _trains(model, way.draw(1, base + way.unit), limit, "split") is not None:
        raise RuntimeError(f"a larger sample trains in as much (size: {base + way.unit})")
    fits, too_large = way.size, int(way.size * most ** (1 / way.power)) + 1
    rungs: list[str] = []
    while too_large - fits > max(1, fits // 50):
        middle = (fits + too_large) // 2
        taken = _trains(model, way.draw(1, middle * way.unit), limit, "auto")
        if taken is None:
            too_large = middle
        else:
            fits, rungs = middle, taken
    small, large = (_activations(model, way.draw(1, n * way.unit)) for n in (way.size, fits))
    return {
        "limit_bytes": limit,
        "split_size": base,
        "ladder_size": fits * way.unit,
        "split_bytes": small,
        "ladder_bytes": large,
        "ratio": large / small,
        "rungs": rungs,
    }


def _peak(model: nn.Module, sample: torch.Tensor) -> int:
    """Of a step with room, over what is in use before."""
    import brimful

    sizer = brimful.BatchSizer(model, predict=False, batch_norm="freeze")
    for _ in range(2):  # what is made once is made in the first
        plans.clear(model)
        gc.collect()
        before = plans.used_bytes()
        peak = int(sizer.step(sample, models.loss).peak_bytes) - before
    plans.clear(model)
    return peak


def _trains(model: nn.Module, sample: torch.Tensor, limit: int, ladder: str) -> list[str] | None:
    """The rungs of each step; None where no rung is enough."""
    import brimful

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    sizer = brimful.BatchSizer(model, optimizer, predict=False, batch_norm="freeze", ladder=ladder)
    taken = []
    plans.clear(model)
    try:
        with plans.room(limit):
            for _ in range(STEPS):
                taken.append(plans.describe(sizer.step(sample, models.loss).rungs)[:200])
                optimizer.step()
                optimizer.zero_grad()
    except brimful.BatchTooLarge:
        return None
    finally:
        plans.clear(model)
    return taken


def _activations(model: nn.Module, sample: torch.Tensor) -> int:
    gc.collect()
    before = plans.used_bytes()
    loss = models.loss(model, sample)
    held = plans.used_bytes() - before
    del loss
    return held
