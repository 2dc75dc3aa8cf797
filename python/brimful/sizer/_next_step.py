"""What the next step of an optimizer allocates, found on stand-ins."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from brimful import _C

_Spec = tuple[torch.Size, torch.dtype, torch.device]


class NextStep(NamedTuple):
    """Bytes, and by parameter the state that the step will make."""

    kept_bytes: int
    peak_bytes: int
    states: list[tuple[torch.Tensor, list[_Spec]]]


_NOTHING = NextStep(0, 0, [])
_CUDA_BLOCK_BYTES = 512


def taken(bytes: int, device: torch.device) -> int:
    """What an allocator gives for so many bytes."""
    return -(-bytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES if device.type == "cuda" else bytes


class _Measured:
    """The most that the allocator of `target` gives inside beyond what is in use; 0 for a step on another device."""

    def __init__(self, device: torch.device | str, target: torch.device) -> None:
        self._scope = _C._PeakScope(target) if str(device) != "meta" else None
        self._target = target
        self.bytes = 0

    def __enter__(self) -> _Measured:
        if self._scope is not None:
            self._before = _C.memory_stats(self._target).used_bytes
            self._scope.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._scope is not None:
            self._scope.__exit__(*error)
            self.bytes = self._scope.peak_bytes - self._before


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the bytes of storages that are made inside, as they would be on `device`."""

    def __init__(self, known: Iterable[torch.Tensor], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.bytes = self.peak_bytes = 0
        self.has_scratch = False  # memory of an operator's own, which no tensor shows
        self._device = device
        self._keys = {storage._cdata for tensor in known for storage in _storages(tensor)}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.has_scratch = self.has_scratch or _may_take_scratch(func)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                for storage in _storages(tensor):
                    self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        on_host = self._device.type != "cpu" and storage.device.type == "cpu"
        if key in self._keys or on_host:
            return
        self._keys.add(key)
        bytes = taken(storage.nbytes(), self._device)
        self.bytes += bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._forget, key, bytes).atexit = False

    def _forget(self, key: int, bytes: int) -> None:
        self._keys.discard(key)
        self.bytes -= bytes


def _may_take_scratch(func: Any) -> bool:
    """Products of matrices, whose libraries pack their factors or lend a workspace, and decompositions."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(func, "overloadpacket", None)
    return packet in flop_registry or "linalg_" in str(packet)


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
    return [part.untyped_storage() for part in parts]


def next_step(optimizer: torch.optim.Optimizer, without: Container[torch.Tensor] = ()) -> NextStep:
    """The optimizer, its parameters, its state and its hooks are left alone.

    ``without`` parameters that it does not step by itself.

    All zero for a step that is none of torch's own, or needs more than gradients (LBFGS): its first step shows them.
    """
    try:
        step = _torchs_step(optimizer)
        fused = any(group.get("fused") for group in optimizer.param_groups)
        groups = [
            {**group, "params": [p for p in group["params"] if p not in without]}
            for group in optimizer.param_groups
        ]
        try:
            found, has_scratch = _rehearse(optimizer, step, groups, "meta")
        except RuntimeError:  # a step that reads values
            has_scratch = True
        if has_scratch:
            found = _rehearse_in_pairs(optimizer, step, groups)
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


def _rehearse_in_pairs(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any], groups: list[dict[str, Any]]
) -> NextStep:
    """With memory, of each parameter after the one before it, once for all pairs that look alike.

    What a step holds of more parameters at once (foreach; variables of its loop) is not in the peak.
    """
    known: dict[Any, NextStep] = {}

    def found(group: int, parameters: list[torch.Tensor]) -> NextStep:
        looks = (
            group,
            *(
                (p.shape, p.stride(), p.dtype, p.device, not optimizer.state.get(p))
                for p in parameters
            ),
        )
        if looks not in known:
            pair = [{**groups[group], "params": parameters}]
            with _C._Unlimited():
                known[looks], _ = _rehearse(optimizer, step, pair, parameters[0].device)
        return known[looks]

    kept = most = 0
    states = []
    for number, group in enumerate(groups):
        before: list[torch.Tensor] = []
        for parameter in group["params"]:
            alone = found(number, [parameter])
            held = found(number, before).kept_bytes if before else 0
            pair = found(number, [*before, parameter])
            most = max(most, kept - held + pair.peak_bytes)
            kept += alone.kept_bytes
            states += [(parameter, specs) for _, specs in alone.states]
            before = [parameter]
    return NextStep(kept, most, states)


def _rehearse(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    groups: list[dict[str, Any]],
    device: torch.device | str,
) -> tuple[NextStep, bool]:
    """And whether it may have taken memory that no tensor shows: on `meta` that is not counted, elsewhere it is."""
    twins: dict[torch.Tensor, torch.Tensor] = {}
    sparse = isinstance(optimizer, torch.optim.SparseAdam)  # refuses any other gradient
    for group in groups:
        for parameter in group["params"]:
            twins[parameter] = _twin(parameter, device, sparse)
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        stand_in.__dict__[name] = OrderedDict()
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        stand_in.__dict__[name] = lambda: None  # torch's would count CUDA devices
    stand_in.param_groups = [
        {
            **group,
            "params": [twins[p] for p in group["params"]],
            **{key: False for key in ("fused", "capturable") if group.get(key)},
            **({"foreach": True} if _is_foreach_by_default(step, group) else {}),
        }
        for group in groups
    ]
    stand_in.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if parameter in twins:
            stand_in.state[twins[parameter]] = tree_map_only(
                torch.Tensor, lambda tensor: _state_twin(tensor, device), state
            )
    known = [t for p in twins.values() for t in (p, p.grad) if t is not None]
    known += [t for t in tree_leaves(dict(stand_in.state)) if isinstance(t, torch.Tensor)]
    target = next(iter(twins)).device if twins else torch.device("cpu")
    with torch.no_grad(), _Live(known, target) as live, _Measured(device, target) as measured:
        step(stand_in)
    counters = {  # that are on the host in the stand-ins
        parameter
        for group in groups
        for parameter in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    states = [
        (parameter, _specs(parameter, stand_in.state[twin], parameter in counters))
        for parameter, twin in twins.items()
        if not optimizer.state.get(parameter)
    ]
    more = sum(
        taken(value.nbytes, parameter.device)
        for parameter, _ in states
        if parameter in counters and parameter.device.type != "cpu"
        for value in tree_leaves(stand_in.state[twins[parameter]])
        if isinstance(value, torch.Tensor) and value.device.type == "cpu"
    )
    peak_bytes = max(live.peak_bytes, measured.bytes * live.has_scratch)
    return NextStep(live.bytes + more, peak_bytes + more, states), live.has_scratch


def _is_foreach_by_default(step: Callable[..., Any], group: dict[str, Any]) -> bool:
    """As torch chooses where nothing is said: Adafactor alone does not."""
    return (
        group.get("foreach", False) is None
        and group.get("fused") is None
        and not group.get("differentiable")
        and not isinstance(group.get("lr"), torch.Tensor)
        and step.__module__ != "torch.optim._adafactor"
        and all(p.device.type == "cuda" for p in group["params"])
    )


def _twin(parameter: torch.Tensor, device: torch.device | str, sparse: bool) -> torch.Tensor:
    twin = torch.nn.Parameter(
        torch.zeros_like(parameter, device=device), requires_grad=parameter.requires_grad
    )
    if parameter.requires_grad:
        gradient = torch.zeros_like(parameter, device=device, requires_grad=False)
        twin.grad = gradient.to_sparse(1) if sparse else gradient
    return twin


def _state_twin(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor.detach().clone()
    return torch.zeros_like(tensor, device=device)


def _specs(
    parameter: torch.Tensor, state: dict[str, Any], counters_are_beside: bool
) -> list[_Spec]:
    return [
        (
            value.shape,
            value.dtype,
            parameter.device if value.is_meta or counters_are_beside else value.device,
        )
        for value in tree_leaves(state)
        if isinstance(value, torch.Tensor)
    ]
