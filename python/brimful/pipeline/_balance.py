"""Stages of a model that take alike, from what its layers take."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from brimful import _C
from brimful.memory._module_spans import ModuleRows, ModuleSpans
from brimful.memory._summary import (
    LossFn,
    _collected_between_steps,
    _Step,
    _sum_of_outputs,
    summary,
)
from brimful.pipeline import _arguments
from brimful.sizer._unchanged import Unchanged

__all__ = ["balance"]

_ROUNDS = 5
_PARAMETER_COPIES = 2  # itself and its gradient


class _ModuleTimes(ModuleSpans):
    """Seconds of a step by child of the model, forward and backward."""

    def __init__(self, model: torch.nn.Module, rows: ModuleRows, device: torch.device) -> None:
        super().__init__(model, rows, device, 0)
        self.seconds: dict[int, float] = {}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def begin(self, backward: bool) -> None:
        self._in_forward, self.stack = not backward, []
        self._since = self._now()
        self._note_nodes()

    def end(self) -> None:
        self.moved()

    def moved(self) -> None:
        now = self._now()
        if len(self.stack) > 1:
            child = self.stack[1]
            self.seconds[child] = self.seconds.get(child, 0.0) + now - self._since
        self._since = now


def _sum(model: torch.nn.Module, sample: Any) -> Any:
    return _sum_of_outputs(model, (sample,))  # one argument, as a Sequential and a stage take it


def _times(model: torch.nn.Sequential, sample: Any, loss_fn: LossFn) -> list[float]:
    step = _Step(model, loss_fn, None, True, None)
    rows = ModuleRows(model, by_call=False)
    children = [rows.place(child, in_forward=False) for _, child in model.named_children()]
    rounds = []
    with _collected_between_steps(), Unchanged(model, sample, None, step.device) as unchanged:
        for _ in range(1 + _ROUNDS):  # the first makes what is made once and for all
            with _ModuleTimes(model, rows, step.device) as times:
                step.run(sample, times.part)
            unchanged.empty_gradients()
            rounds.append([times.seconds.get(child, 0.0) for child in children])
    return [statistics.median(layer) for layer in zip(*rounds[1:], strict=True)]


def _bytes(model: torch.nn.Sequential, sample: Any, loss_fn: LossFn) -> list[float]:
    rows = {row.name: row for row in summary(model, sample, loss_fn=loss_fn).modules}
    costs = []
    for name, child in model.named_children():
        trained = sum(p.nbytes for p in child.parameters() if p.requires_grad)
        row = rows[name]
        standing = row.parameter_bytes + row.buffer_bytes + (_PARAMETER_COPIES - 1) * trained
        costs.append(float(row.saved_bytes + standing))
    return costs


def balance(
    model: torch.nn.Sequential,
    sample: Any,
    n: int,
    *,
    by: str = "time",
    loss_fn: LossFn | None = None,
) -> list[int]:
    """How many layers each of ``n`` stages has, for ``split_sequential``, so that the costliest costs least.

    A few steps are run with ``sample``, a microbatch, as ``brimful.summary`` runs them, and undone. ``by="time"``
    counts each layer's seconds in forward and backward, the median of five steps; ``by="bytes"`` what it saves for
    backward, its parameters, their gradients and its buffers. The model is whole on one device meanwhile.

    Raises ``ValueError`` for more stages than layers, ``TypeError`` for a model that is no ``Sequential``, and what the
    model raises.
    """
    if not isinstance(model, torch.nn.Sequential):
        raise TypeError(f"balance cuts a torch.nn.Sequential (type: {type(model)})")
    stages = _arguments.whole_number("n", n, 1)
    layers = len(list(model.named_children()))
    if stages > layers:
        raise ValueError(
            f"there are more stages than layers (n: {stages}, layers: {layers}); ask for fewer stages"
        )
    if by not in ("time", "bytes"):
        raise ValueError(f'by must be "time" or "bytes" (by: {by!r})')
    costs = (_times if by == "time" else _bytes)(model, sample, loss_fn or _sum)
    return _C._balanced(costs, stages)
