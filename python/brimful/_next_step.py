"""What the next step of an optimizer allocates, found on stand-ins that hold no memory."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_Spec = tuple[torch.Size, torch.dtype, torch.device]


class NextStep(NamedTuple):
    """Bytes, and by parameter the state that the step will make."""

    kept_bytes: int
    peak_bytes: int
    states: list[tuple[torch.Tensor, list[_Spec]]]


_NOTHING = NextStep(0, 0, [])


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


def next_step(optimizer: torch.optim.Optimizer) -> NextStep:
    """The optimizer, its parameters, its state and its hooks are left alone.

    All zero for a step that is none of torch's own, or needs more than gradients: its first step tells.
    """
    try:
        step = _torchs_step(optimizer)
        fused = any(group.get("fused") for group in optimizer.param_groups)
        found = _rehearse(optimizer, step)
        # A fused step works in place; stand-ins cannot take it.
        return found._replace(peak_bytes=found.kept_bytes) if fused else found
    except Exception as error:
        logging.getLogger("brimful").info(
            "what the state of %s will take is not known before its first step: %s",
            type(optimizer).__name__,
            error,
        )
        return _NOTHING


def _torchs_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Without its wrappers: hooks are the program's."""
    step: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
    if not step.__module__.startswith("torch.optim."):
        raise TypeError("its step is not one of torch's")
    return step


def _rehearse(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> NextStep:
    twins: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            twins[parameter] = _twin(parameter)
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        stand_in.__dict__[name] = OrderedDict()
    stand_in.param_groups = [
        {
            **group,
            "params": [twins[p] for p in group["params"]],
            **{key: False for key in ("fused", "capturable") if group.get(key)},
        }
        for group in optimizer.param_groups
    ]
    stand_in.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if parameter in twins:
            stand_in.state[twins[parameter]] = tree_map_only(torch.Tensor, _state_twin, state)
    known = [t for p in twins.values() for t in (p, p.grad) if t is not None]
    known += [t for t in tree_leaves(dict(stand_in.state)) if isinstance(t, torch.Tensor)]
    with torch.no_grad(), _Live(known) as live:
        step(stand_in)
    states = [
        (parameter, _specs(parameter, stand_in.state[twin]))
        for parameter, twin in twins.items()
        if not optimizer.state.get(parameter)
    ]
    return NextStep(live.bytes, live.peak_bytes, states)


def _twin(parameter: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(
        torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
    )
    if parameter.requires_grad:
        twin.grad = torch.empty_like(parameter, device="meta", requires_grad=False)
    return twin


def _state_twin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if tensor.dim() == 0 else torch.empty_like(tensor, device="meta")


def _specs(parameter: torch.Tensor, state: dict[str, Any]) -> list[_Spec]:
    return [
        (value.shape, value.dtype, parameter.device if value.is_meta else value.device)
        for value in tree_leaves(state)
        if isinstance(value, torch.Tensor)
    ]
