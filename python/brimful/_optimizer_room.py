"""What optimizers take of the memory: their state before it is there, and what a step of theirs takes beside it."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from brimful import _C

# Their state has the shape of the parameters. Others say what they need in their first step.
_KNOWN = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)
_LARGEST = 4096  # elements of the largest parameter that stands in for a real one
_MEASURED_STEPS = 2  # the first one makes the state


class OptimizerRoom:
    """Keeps the room of state that optimizers make in their first step, until they do.

    What is kept is memory alone: the optimizers and their `state` are not touched, so that a first step is one.
    How much it is tells a step of the same class on parameters that are smaller by a common factor.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._device = device
        self._told: dict[torch.optim.Optimizer, tuple[list[_StateOf], int]] = {}
        self._kept: dict[torch.optim.Optimizer, dict[torch.Tensor, list[torch.Tensor]]] = {}
        self._steps = dict.fromkeys(optimizers, 0)
        self._step_bytes = dict.fromkeys(optimizers, 0)

    @property
    def step_bytes(self) -> int:
        """What a step takes beside parameters, gradients and state: told, and from its first step on measured."""
        return max(self._step_bytes.values(), default=0)

    def keep(self) -> None:
        """Allocate what the state will take, where a limit holds for sizes that are chosen from now on."""
        for optimizer, steps in self._steps.items():
            if steps > 0:
                continue
            if optimizer not in self._told:
                self._told[optimizer] = _tell(optimizer, self._device)
                self._step_bytes[optimizer] = self._told[optimizer][1]
            states, _ = self._told[optimizer]
            kept = self._kept.setdefault(optimizer, {})
            with _C._Unlimited():
                for parameter, tensors in states:
                    if optimizer.state.get(parameter):
                        kept.pop(parameter, None)
                    elif parameter not in kept and parameter.requires_grad:
                        kept[parameter] = [
                            torch.empty(shape, dtype=dtype, device=device)
                            for shape, dtype, device in tensors
                        ]

    def kept_bytes(self, device: torch.device) -> int:
        return sum(
            t.numel() * t.element_size()
            for kept in self._kept.values()
            for tensors in kept.values()
            for t in tensors
            if t.device == device
        )

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer, measure: bool) -> Iterator[None]:
        """Around a step: the room is its own now."""
        self._kept.pop(optimizer, None)
        if self._steps[optimizer] >= _MEASURED_STEPS or not measure or self._device.type != "cpu":
            yield
        else:
            with _C._PeakScope(self._device) as scope:
                yield
                left = _C.memory_stats(self._device).used_bytes
                self._step_bytes[optimizer] = scope.peak_bytes - left
        self._steps[optimizer] += 1


_Spec = tuple[torch.Size, torch.dtype, torch.device]
_StateOf = tuple[torch.Tensor, list[_Spec]]


def _tell(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[list[_StateOf], int]:
    """The state of each parameter, and the bytes that a step takes beside it."""
    try:
        return _rehearse(optimizer, device)
    except Exception as error:
        logging.getLogger("brimful").info(
            "what the state of %s will take is not known before its first step: %s",
            type(optimizer).__name__,
            error,
        )
        return [], 0


def _rehearse(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[list[_StateOf], int]:
    base: Any = next((c for c in type(optimizer).__mro__ if c in _KNOWN), None)
    step = inspect.unwrap(type(optimizer).step)  # without hooks, which are the program's
    if base is None or step is not inspect.unwrap(base.step):
        raise TypeError("it is none of torch's whose state is like the parameters")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    factor = max(1.0, max((p.numel() for p in parameters), default=1) / _LARGEST)
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    with _C._Unlimited(), torch.no_grad():
        for parameter in parameters:
            stand_in = torch.zeros(_smaller(parameter.shape, factor), dtype=parameter.dtype)
            gradient = torch.zeros_like(stand_in)
            stand_in.grad = gradient.to_sparse() if base is torch.optim.SparseAdam else gradient
            stand_ins[parameter] = stand_in
        copy = base([_group(group, stand_ins, device) for group in optimizer.param_groups])
        traces = []
        for _ in range(2):
            with _C._TraceScope() as scope:
                step(copy)
            traces.append(scope.trace)
    states = [(p, _state_of(p, stand_ins[p], copy.state[stand_ins[p]])) for p in parameters]
    # The first step makes the state, which stays.
    beside = max(_peak(traces[0]) - sum(traces[0]), _peak(traces[1]))
    return states, math.ceil(beside * factor) if device.type == "cpu" else 0


def _smaller(shape: torch.Size, factor: float) -> list[int]:
    return [math.ceil(shape.numel() / factor)] + [1] * (len(shape) - 1) if shape else []


def _group(
    group: dict[str, Any], stand_ins: dict[torch.Tensor, torch.Tensor], device: torch.device
) -> dict[str, Any]:
    like = {key: value for key, value in group.items() if key != "param_names"}
    like["params"] = [stand_ins[p] for p in group["params"]]
    if like.get("capturable"):
        like["capturable"] = False
    if device.type != "cpu":
        like.update({key: False for key in ("foreach", "fused") if key in like})
    return like


def _state_of(
    parameter: torch.Tensor, stand_in: torch.Tensor, state: dict[str, Any]
) -> list[_Spec]:
    return [
        (parameter.shape, value.dtype, parameter.device)
        if value.shape == stand_in.shape
        else (value.shape, value.dtype, value.device)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def _peak(trace: Sequence[int]) -> int:
    used = peak = 0
    for bytes in trace:
        used += bytes
        peak = max(peak, used)
    return peak
