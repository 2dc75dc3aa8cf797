"""What `brimful.summary` predicts of a step's peak from two small batches, against the allocator's own."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import brimful
from benchmarks import common
from benchmarks.sizer import models

IDS = ("probes.summary_worst",)
WIDTH = 128


class Reused(nn.Module):
    """One layer that is called 50 times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = torch.tanh(self.layer(x))
        return x


class Views(nn.Module):
    """Keeps three views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.body(x).view(x.shape[0], 3, WIDTH).unbind(1)
        out: torch.Tensor = self.head(a * b.sigmoid() + c)
        return out


class Reentrant(nn.Module):
    """Checkpoints that run a backward within backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        body = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.body = nn.Sequential(*body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.body, x, use_reentrant=True)
        return x


def _wide(rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH)


CASES = {
    "reused": models.Case(Reused, _wide, 256),
    "views": models.Case(Views, _wide, 256),
    "reentrant": models.Case(Reentrant, _wide, 256),
    **{
        name: models.CASES[name]
        for name in ("in-place ReLU", "checkpointed", "conv + BN", "U-Net", "encoder", "LSTM")
    },
}


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the largest error; a measured peak that is not the allocator's to the byte stops it."""
    conditions: dict[str, Any] = {**common.machine_conditions(), "models": {}}
    worst = 0.0
    for name, case in CASES.items():
        torch.manual_seed(0)
        model = case.make()
        optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
        batch = case.batch(32 if quick else 128)
        gc.collect()
        found = brimful.summary(model, batch, loss_fn=models.loss, optimizer=optimizer)
        peak = _peak(model, optimizer, batch)
        if found.peak_bytes != peak:
            raise RuntimeError(
                f"{name}: the measured peak is not the allocator's ({found}: {peak})"
            )
        if found.predicted_bytes is None:
            raise RuntimeError(f"{name}: nothing was predicted")
        before = found.used_bytes
        error = abs(found.predicted_bytes - peak) / peak
        worst = max(worst, error)
        conditions["models"][name] = {
            "peak_bytes": peak,
            "before_bytes": before,
            "predicted_bytes": found.predicted_bytes,
            "error": error,
            "error_of_step": abs(found.predicted_bytes - peak) / max(1, peak - before),
            **_torchinfo(model, batch),
        }
        print(f"\n{IDS[0]}: {name}: {conditions['models'][name]}")
    yield common.Figure(
        IDS[0], "fraction", worst, worst, worst, None, rounds=1, conditions=conditions
    )


def _peak(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> int:
    for _ in range(3):
        brimful.memory.reset_peak("cpu")
        models.loss(model, batch).backward()
        optimizer.step()
        peak = brimful.memory.stats("cpu").peak_bytes
        optimizer.zero_grad()
    return peak


def _torchinfo(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    """What it says of the same model, where it is installed: parameters and outputs, no peak."""
    try:
        told = importlib.import_module("torchinfo").summary(model, input_data=batch, verbose=0)
    except ImportError:
        return {"torchinfo": "not installed"}
    except Exception as error:  # it is not our code that failed: say so beside the figure
        return {"torchinfo": f"failed: {type(error).__name__}: {error}"}
    return {
        "torchinfo": int(told.total_input + told.total_output_bytes + told.total_param_bytes),
        "torchinfo_version": importlib.metadata.version("torchinfo"),
    }
