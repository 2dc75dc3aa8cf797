"""torch's own prediction of a step's memory: FakeTensorMode and MemTracker."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.sizer import models


def peak_bytes(
    case: models.Case, rows: int, make: Callable[[Any], torch.optim.Optimizer] | None = None
) -> int:
    """Of a step over what is in use before it; raises what FakeTensorMode cannot take."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = case.make()
        optimizer = None
        if make is not None:
            optimizer = make([p for p in model.parameters() if p.requires_grad])

        def step() -> None:
            models.loss(model, x).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()

        x = case.batch(2)
        step()  # makes the optimizer's state
        x = case.batch(rows)
        tracker = MemTracker()
        tracker.track_external(model, x, *([optimizer] if optimizer is not None else []))
        with tracker:
            before = _total(tracker.get_tracker_snapshot("current"))
            step()
        return _total(tracker.get_tracker_snapshot("peak")) - before


def _total(snapshot: dict[torch.device, dict[str, int]]) -> int:
    return int(
        sum(
            bytes
            for of_device in snapshot.values()
            for kind, bytes in of_device.items()
            if "Total" in str(kind)
        )
    )
