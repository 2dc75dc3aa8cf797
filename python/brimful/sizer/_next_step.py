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
from brimful._log import text_of

_Spec = tuple[torch.Size, torch.dtype, torch.device]


class NextStep(NamedTuple):
    """Bytes, and by parameter the state that the step will make."""

    kept_bytes: int
    peak_bytes: int
    states: list[tuple[torch.Tensor, list[_Spec]]]


_NOTHING = NextStep(0, 0, [])
_CUDA_BLOCK_BYTES = 512
_COPIED_BYTES = 1 << 20  # larger tensors of an optimizer's own are not copied, and not written to


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
        self.has_lists = False  # operators that take many parameters at once
        self._device = device
        self._keys = {storage._cdata for tensor in known for storage in _storages(tensor)}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.check(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        self.has_scratch = self.has_scratch or _may_take_scratch(func)
        self.has_lists = self.has_lists or "_foreach_" in str(func)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                for storage in _storages(tensor):
                    self._count(storage)
                    self.note(storage)
        return out

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Before each operator."""

    def note(self, storage: torch.UntypedStorage) -> None:
        """Of what an operator returned."""

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


class _Apart(_Live):  # type: ignore[no-untyped-call, unused-ignore]
    """For a step that is not torch's: it may write to nothing but stand-ins, nor wait for other ranks."""

    def __init__(
        self, known: Iterable[torch.Tensor], device: torch.device, held: Iterable[torch.Tensor]
    ) -> None:
        super().__init__(known, device)
        self._own = set(self._keys)
        self._keys.update(storage._cdata for tensor in held for storage in _storages(tensor))

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        if func.namespace.startswith(("c10d", "_c10d")):
            raise TypeError("its step communicates")
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(given):
                if isinstance(tensor, torch.Tensor) and any(
                    storage._cdata not in self._own for storage in _storages(tensor)
                ):
                    raise TypeError("its step writes to tensors that are not its parameters'")

    def note(self, storage: torch.UntypedStorage) -> None:
        self._own.add(storage._cdata)


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

    A step that is not torch's own runs on stand-ins with memory, one parameter after another. All zero for a step that
    needs more than gradients (LBFGS), communicates, or steps an optimizer within this one: its first step shows them.
    """
    try:
        step: Callable[..., Any] = inspect.unwrap(type(optimizer).step)  # hooks are the program's
        if not _is_torchs(step):
            return _others_step(optimizer, step, without)
        fused = any(group.get("fused") for group in optimizer.param_groups)
        groups = _groups(optimizer, without)
        try:
            found, live = _rehearse(optimizer, step, groups, "meta")
            has_scratch = live.has_scratch
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
            text_of(error),
        )
        return _NOTHING


def _is_torchs(step: Callable[..., Any]) -> bool:
    return step.__module__.startswith("torch.optim.")


def _groups(
    optimizer: torch.optim.Optimizer, without: Container[torch.Tensor]
) -> list[dict[str, Any]]:
    return [
        {**group, "params": [p for p in group["params"] if p not in without]}
        for group in optimizer.param_groups
    ]


def _others_step(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any], without: Container[torch.Tensor]
) -> NextStep:
    if any(hasattr(value, "param_groups") for value in vars(optimizer).values()):
        raise TypeError("it steps an optimizer within it")
    groups = _groups(optimizer, without)
    devices = {p.device for group in groups for p in group["params"] if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        return _rehearse_in_pairs(optimizer, step, groups)


def _rehearse_in_pairs(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any], groups: list[dict[str, Any]]
) -> NextStep:
    """With memory, of each parameter after the one before it, once for all pairs that look alike.

    What a step holds of more parameters at once (variables of its loop) is not in the peak. Of a step that takes lists
    of them (foreach) it is what that takes for each, all at once.
    """
    known: dict[Any, NextStep] = {}
    has_lists = False

    def found(group: int, parameters: list[torch.Tensor]) -> NextStep:
        nonlocal has_lists
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
                known[looks], live = _rehearse(optimizer, step, pair, parameters[0].device)
            has_lists = has_lists or live.has_lists
        return known[looks]

    kept = most = beside = 0
    states = []
    for number, group in enumerate(groups):
        before: list[torch.Tensor] = []
        for parameter in group["params"]:
            alone = found(number, [parameter])
            held = found(number, before).kept_bytes if before else 0
            pair = found(number, [*before, parameter])
            most = max(most, kept - held + pair.peak_bytes)
            kept += alone.kept_bytes
            beside += alone.peak_bytes - alone.kept_bytes
            states += [(parameter, specs) for _, specs in alone.states]
            before = [parameter]
    return NextStep(kept, max(most, kept + beside) if has_lists else most, states)


def _rehearse(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    groups: list[dict[str, Any]],
    device: torch.device | str,
) -> tuple[NextStep, _Live]:
    """And what its operators were: memory that no tensor shows is not counted on `meta`, elsewhere it is."""
    twins: dict[torch.Tensor, torch.Tensor] = {}
    sparse = isinstance(optimizer, torch.optim.SparseAdam)  # refuses any other gradient
    for group in groups:
        for parameter in group["params"]:
            twins[parameter] = _twin(parameter, device, sparse)
    of_torch = _is_torchs(step)
    stand_in = _stand_in(optimizer, step, groups, twins, device)
    known = [t for p in twins.values() for t in (p, p.grad) if t is not None]
    known += [t for t in tree_leaves(dict(stand_in.state)) if isinstance(t, torch.Tensor)]
    target = next(iter(twins)).device if twins else torch.device("cpu")
    watch: _Live
    if of_torch:
        watch = _Live(known, target)
    else:
        attributes = [_own_attributes(stand_in), stand_in.param_groups]
        held = [t for t in tree_leaves(attributes) if isinstance(t, torch.Tensor)]
        known += [t for t in held if _is_copied(t)]
        watch = _Apart(known, target, held)
    with torch.no_grad(), watch as live, _Measured(device, target) as measured:
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
    peak_bytes = max(live.peak_bytes, measured.bytes if live.has_scratch or not of_torch else 0)
    return NextStep(live.bytes + more, peak_bytes + more, states), live


def _stand_in(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    groups: list[dict[str, Any]],
    twins: dict[torch.Tensor, torch.Tensor],
    device: torch.device | str,
) -> torch.optim.Optimizer:
    """With twins in the place of parameters, and state that is like the optimizer's."""
    of_torch = _is_torchs(step)
    if not of_torch:  # some return early where all gradients are 0
        for twin in twins.values():
            twin.data.fill_(0.01)
            if twin.grad is not None:
                twin.grad.fill_(0.001)
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(
        optimizer.__dict__ if of_torch else _copied(_own_attributes(optimizer), twins)
    )
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        stand_in.__dict__[name] = OrderedDict()
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        stand_in.__dict__[name] = lambda: None  # torch's would count CUDA devices
    stand_in.param_groups = [
        {
            **(group if of_torch else _copied({**group, "params": []}, twins)),
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
        elif not isinstance(parameter, torch.Tensor):  # a number of all parameters
            stand_in.state[parameter] = _copied(state, twins)
    return stand_in


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}


def _is_copied(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= _COPIED_BYTES


def _copied(value: Any, twins: dict[torch.Tensor, torch.Tensor]) -> Any:
    """Anew, so that a step changes none of the optimizer's own; parameters' twins in their place."""
    if isinstance(value, torch.Tensor):
        if value in twins:
            return twins[value]
        return value.detach().clone() if _is_copied(value) else value
    if type(value) in (dict, OrderedDict, defaultdict):
        copied = {key: _copied(item, twins) for key, item in value.items()}
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, copied)
        return type(value)(copied)
    if type(value) in (list, tuple, set):
        return type(value)(_copied(item, twins) for item in value)
    return value


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
