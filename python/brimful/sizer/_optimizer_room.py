"""The memory of optimizers' state before it is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from brimful import _C
from brimful.sizer._host_state import HostState
from brimful.sizer._next_step import NextStep, next_step, taken


class OptimizerRoom:
    """Keeps the room of state that optimizers make in their first step, until they do.

    What is kept is memory alone: the optimizers and their ``state`` are not touched, so that a first step is one.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], host: HostState | None = None
    ) -> None:
        self._host = host
        self._kept: dict[torch.optim.Optimizer, dict[torch.Tensor, list[torch.Tensor]]] = {
            optimizer: {} for optimizer in optimizers
        }
        self._stepped = dict.fromkeys(optimizers, False)
        self._found: dict[torch.optim.Optimizer, tuple[tuple[int, ...], NextStep]] = {}

    def keep(self) -> None:
        """Allocate what the state will take, where a limit holds for sizes that are chosen from now on."""
        for optimizer, kept in self._kept.items():
            if self._stepped[optimizer]:
                continue
            for parameter in [p for p in kept if optimizer.state.get(p)]:
                del kept[parameter]
            with _C._Unlimited():
                for parameter, specs in self._next(optimizer).states:
                    if parameter not in kept:
                        kept[parameter] = [
                            torch.empty(shape, dtype=dtype, device=device)
                            for shape, dtype, device in specs
                        ]

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Its step begins: the room is its own now."""
        self._kept[optimizer] = {}
        self._stepped[optimizer] = True

    def empty(self) -> None:
        """What is kept is not what the state will take any more."""
        self._kept = {optimizer: {} for optimizer in self._kept}

    def tensors(self) -> list[torch.Tensor]:
        """What is kept."""
        return [t for kept in self._kept.values() for tensors in kept.values() for t in tensors]

    def next_step_bytes(self) -> int:
        """The most that a step of each, one after another, takes beyond what is in use now."""
        total = most = 0
        for optimizer, kept in self._kept.items():
            found = self._next(optimizer)
            total -= sum(
                taken(tensor.nbytes, tensor.device)
                for parameter, tensors in kept.items()
                for tensor in tensors
                if tensor.device == parameter.device  # else a counter on the host
            )
            most = max(most, total + found.peak_bytes)
            total += found.kept_bytes
        return most

    def _next(self, optimizer: torch.optim.Optimizer) -> NextStep:
        host = self._host
        made: tuple[int, ...] = (
            len(optimizer.state),
            sum(len(g["params"]) for g in optimizer.param_groups),
            *(() if host is None else host.look(optimizer)),
        )
        known = self._found.get(optimizer)
        if known is None or known[0] != made:
            found = next_step(optimizer) if host is None else host.next_step(optimizer)
            known = self._found[optimizer] = made, found
        return known[1]
