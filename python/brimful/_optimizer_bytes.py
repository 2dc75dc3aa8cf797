"""What the next step of an optimizer allocates, found on stand-ins that hold no memory."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the bytes of storages that are made inside."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.bytes = self.peak_bytes = 0
        self._keys = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._keys:
            return
        self._keys.add(key)
        self.bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    def _forget(self, key: int, bytes: int) -> None:
        self._keys.discard(key)
        self.bytes -= bytes


def step_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int] | None:
    """What its next step keeps, and the most that it holds at once; None where stand-ins cannot take the step.

    The optimizer, its parameters and its state stay as they are.
    """
    twins: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            twins[parameter] = _twin(parameter)
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        stand_in.__dict__[name] = OrderedDict()
    stand_in.param_groups = [
        {**group, "params": [twins[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    stand_in.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if parameter in twins:
            stand_in.state[twins[parameter]] = tree_map_only(torch.Tensor, _state_twin, state)
    known = [t for p in twins.values() for t in (p, p.grad) if t is not None]
    known += [t for t in tree_leaves(dict(stand_in.state)) if isinstance(t, torch.Tensor)]
    try:
        with _Live(known) as live:
            type(optimizer).step(stand_in)
    except Exception:
        return None
    return live.bytes, live.peak_bytes


def _twin(parameter: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(
        torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
    )
    if parameter.requires_grad:
        twin.grad = torch.empty_like(parameter, device="meta", requires_grad=False)
    return twin


def _state_twin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if tensor.dim() == 0 else torch.empty_like(tensor, device="meta")
