"""The state of optimizers where it takes no memory of the device: in a file (CPU), or on the host (CUDA)."""

from __future__ import annotations

import bisect
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from brimful import _C
from brimful.sizer._next_step import NextStep, next_step, taken

_Optimizer = torch.optim.Optimizer
_Group = dict[str, Any]
_Parcel = tuple[_Optimizer, _Group, torch.Tensor]
_Homes = dict[str, torch.Tensor]  # of one parameter, by the name in its state
#: Of smaller parameters the state stays: a file gives whole pages.
_LEAST_BYTES = 4096
_STEPS = {"torch.optim.adam", "torch.optim.adamw", "torch.optim.sgd"}


def can_leave(optimizer: _Optimizer) -> bool:
    """Whether it is one of those whose state can lie elsewhere."""
    known = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.SGD)
    return known and inspect.unwrap(type(optimizer).step).__module__ in _STEPS


def _require(optimizers: Sequence[_Optimizer]) -> None:
    if not optimizers:
        raise ValueError(
            "there is no optimizer whose state could lie elsewhere (optimizer: None, ladder: 'state'); pass it, or "
            "leave 'state' out of ladder"
        )
    for optimizer in optimizers:
        if not can_leave(optimizer):
            raise TypeError(
                f"only the state of torch's Adam, AdamW and SGD can lie elsewhere (optimizer: "
                f"{type(optimizer).__name__}, ladder: 'state'); take one of these, or leave 'state' out of ladder"
            )
        for group in optimizer.param_groups:
            for option in ("differentiable", "capturable"):
                if group.get(option):
                    raise ValueError(
                        f"an optimizer with this option cannot step on the host ({option}: True, ladder: 'state'); "
                        f"leave {option} out, or 'state' out of ladder"
                    )


def _names(optimizer: _Optimizer, group: _Group) -> list[str]:
    """Of what the state has of a parameter's size."""
    if isinstance(optimizer, torch.optim.SGD):
        return ["momentum_buffer"] if group["momentum"] != 0 else []
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _is_plain(parameter: torch.Tensor) -> bool:
    """Dense: torch's fused kernels for the CPU go through memory in its order."""
    dense = parameter.layout == torch.strided and parameter.is_floating_point()
    return dense and (
        parameter.is_contiguous()
        or torch.empty_like(parameter.detach(), device="meta").stride() == parameter.stride()
    )


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)


class _Scale:
    """What a GradScaler gives an optimizer that unscales by itself."""

    def __init__(self, optimizer: _Optimizer) -> None:
        scale, inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        self.grad_scale = None if scale is None else scale.detach().to("cpu", torch.float32)
        self.skips = inf is not None and bool(inf.item())


class HostState:
    """Which state of the optimizers lies elsewhere, and the steps of those parameters, on the CPU by torch's kernels.

    Where an optimizer's state has no room on the CPU, all its parameters are stepped by the fused kernels: they take no
    memory beside, and so a training has the same bits whatever lies in the file.
    """

    def __init__(self, optimizers: Sequence[_Optimizer], device: torch.device) -> None:
        _require(optimizers)
        self._device = device
        self._homes: dict[_Optimizer, dict[torch.Tensor, _Homes]] = {o: {} for o in optimizers}
        self._fused = dict.fromkeys(optimizers, False)
        self._failed = self._alike = False
        self._places = 0  # how often that has changed
        #: Called before state is loaded, which would go to the device.
        self.decide: Callable[[], object] = lambda: None
        for optimizer in optimizers:
            self._follow_loads(optimizer)

    def be_alike(self) -> None:
        """Of several ranks: parameters have the same bits on all, and so the same kernels everywhere.

        On the CPU what lies in a file makes no difference; on a device all the state leaves, room or not.
        """
        self._alike = True
        if self._device.type == "cpu":
            self._fused = dict.fromkeys(self._fused, True)

    @property
    def is_all_due(self) -> bool:
        return self._alike and self._device.type != "cpu"

    def next_step(self, optimizer: _Optimizer) -> NextStep:
        """What its next step takes of the device."""
        moved = self._homes[optimizer]
        found = next_step(optimizer, without=moved)
        if not self._fused[optimizer]:
            return found
        counters = 0 if isinstance(optimizer, torch.optim.SGD) else 4
        kept = found.kept_bytes + sum(counters for p in moved if not optimizer.state.get(p))
        return NextStep(kept, kept, found.states)

    def look(self, optimizer: _Optimizer) -> tuple[int, bool]:
        """Changes whenever next_step would."""
        return self._places, self._fused[optimizer]

    def lies_elsewhere(self, optimizer: _Optimizer, parameter: Any, name: Any) -> bool:
        home = self._homes[optimizer].get(parameter, {}).get(name)
        return home is not None and home is optimizer.state.get(parameter, {}).get(name)

    def make_room(self, missing_bytes: Callable[[], int], *, all_of_it: bool = False) -> bool:
        """Move as much state as is missing, largest parameters first; nothing where that would not do.

        ``all_of_it``: whatever is missing. Returns whether anything changed. Warns once where there is no place for it.
        """
        if self._failed or not (all_of_it or missing_bytes() > 0):
            return False
        before = dict(self._fused)
        if self._device.type == "cpu":
            self._fused = dict.fromkeys(before, True)
        movable: Sequence[_Parcel] = sorted(self._movable(), key=lambda parcel: -parcel[2].nbytes)
        if not all_of_it:
            movable = self._fewest(missing_bytes, movable)
        is_enough = all_of_it or self._missing(missing_bytes, movable) <= 0
        changes = bool(movable) or self._fused != before
        if not (is_enough and changes and self._move(movable)):
            self._fused = before
            return False
        self._log()
        return True

    def _movable(self) -> list[_Parcel]:
        return [
            (optimizer, group, p)
            for optimizer, homes in self._homes.items()
            for group in optimizer.param_groups
            if _names(optimizer, group)
            for p in group["params"]
            if p not in homes
            and p.requires_grad
            and p.nbytes >= _LEAST_BYTES
            and p.device == self._device
            and _is_plain(p)
        ]

    def _fewest(
        self, missing_bytes: Callable[[], int], movable: Sequence[_Parcel]
    ) -> Sequence[_Parcel]:
        """Which of these leave enough, with a gradient more: a piece's, before it is added to those of others."""
        beside = max((p.nbytes for *_, p in movable), default=0)
        count = bisect.bisect_left(
            range(len(movable)),
            True,
            key=lambda count: self._missing(missing_bytes, movable[:count]) + beside <= 0,
        )
        return movable[:count]

    def _missing(self, missing_bytes: Callable[[], int], moved: Sequence[_Parcel]) -> int:
        """As if the state of these were elsewhere."""
        there = 0
        for optimizer, group, p in moved:
            self._homes[optimizer][p] = {}
            state = optimizer.state.get(p, {})
            for value in map(state.get, _names(optimizer, group)):
                if isinstance(value, torch.Tensor) and value.device == self._device:
                    there += taken(value.nbytes, value.device)
        self._places += 1
        try:
            return missing_bytes() - there
        finally:
            for optimizer, _, p in moved:
                del self._homes[optimizer][p]
            self._places += 1

    def _move(self, chosen: Sequence[_Parcel]) -> bool:
        try:
            made = [
                (optimizer, p, {name: self._home(p) for name in _names(optimizer, group)})
                for optimizer, group, p in chosen
            ]
        except (OSError, RuntimeError, torch.OutOfMemoryError) as error:
            if self.is_all_due:
                raise
            self._failed = True
            text = str(error).split("\n", 1)[0]
            logging.getLogger("brimful").warning(
                "the optimizer's state stays where it is: %s", text
            )
            return False
        for optimizer, parameter, homes in made:
            self._homes[optimizer][parameter] = homes
        self._places += 1
        self.adopt()
        return True

    def _home(self, parameter: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return _C._scratch_zeros_like(parameter.detach())
        return _pinned_like(parameter).zero_()

    def _log(self) -> None:
        moved = [homes for of in self._homes.values() for homes in of.values()]
        every = sum(len(g["params"]) for optimizer in self._homes for g in optimizer.param_groups)
        on_cpu = self._device.type == "cpu"
        where = "in a file" if on_cpu else "on the host"
        logging.getLogger("brimful").info(
            "from here on the optimizer's state lies %s (parameters moved: %d of %d, bytes: %s); torch's fused kernel "
            "for the CPU makes the step of %s parameters",
            where if moved else "where it was",
            len(moved),
            every,
            _C._format_bytes(sum(home.nbytes for homes in moved for home in homes.values())),
            "all" if on_cpu else "these",
        )

    def adopt(self) -> None:
        """Take back to its place what was loaded, or put in by the program."""
        for optimizer, moved in self._homes.items():
            for parameter, homes in moved.items():
                if state := optimizer.state.get(parameter):
                    for name, home in homes.items():
                        self._put(state, name, home)

    @staticmethod
    def _put(state: dict[str, Any], name: str, home: torch.Tensor) -> None:
        there = state.get(name)
        if there is not None and there is not home:
            with torch.no_grad():
                home.copy_(there)
            state[name] = home

    def step(
        self, optimizer: _Optimizer, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """``inner(*args, **kwargs)``, torch's step: of the other parameters alone.

        Ours are stepped where torch calls a closure: behind the hooks before a step. Their gradients are out of sight
        until the hooks behind it.
        """
        rest = list(args)
        closure = kwargs.pop("closure", None) or (rest.pop(0) if rest else None)
        hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

        def first() -> Any:
            loss = closure() if closure is not None else None
            with torch.no_grad():
                self._step_ours(optimizer, hidden)
            return loss

        def show(*_: Any) -> None:
            while hidden:
                parameter, gradient = hidden.pop()
                parameter.grad = gradient

        handle = optimizer.register_step_post_hook(show)
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        try:
            return inner(first, *rest, **kwargs)
        finally:
            handle.remove()
            show()

    def _step_ours(
        self, optimizer: _Optimizer, hidden: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        if not self._fused[optimizer] and not self._homes[optimizer]:
            return
        scale = _Scale(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or not self._is_ours(optimizer, parameter, gradient):
                    continue
                if not scale.skips:
                    self._step_one(optimizer, group, parameter, scale.grad_scale)
                hidden.append((parameter, gradient))
                parameter.grad = None

    def _is_ours(
        self, optimizer: _Optimizer, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> bool:
        if parameter in self._homes[optimizer]:
            if gradient.layout != torch.strided:
                raise TypeError(
                    "a gradient is sparse, and the optimizer's state lies elsewhere (shape: "
                    f"{tuple(parameter.shape)}); leave 'state' out of ladder, or make dense gradients"
                )
            return True
        on_cpu = self._fused[optimizer] and parameter.device.type == "cpu"
        return on_cpu and gradient.layout == torch.strided and _is_plain(parameter)

    def _step_one(
        self,
        optimizer: _Optimizer,
        group: _Group,
        parameter: torch.Tensor,
        grad_scale: torch.Tensor | None,
    ) -> None:
        gradient = parameter.grad
        assert gradient is not None
        on_cpu = parameter.device.type == "cpu"
        p = parameter if on_cpu else _pinned_like(parameter).copy_(parameter)
        if on_cpu and gradient.stride() == p.stride():
            g = gradient
        else:
            g = (torch.empty_like(p) if on_cpu else _pinned_like(p)).copy_(gradient)
        if isinstance(optimizer, torch.optim.SGD):
            buffer, is_first = self._momentum_of(optimizer, group, parameter)
            _step_sgd(group, p, g, buffer, is_first, grad_scale)
        else:
            _step_adam(group, p, g, self._moments_of(optimizer, group, parameter), grad_scale)
        if not on_cpu:
            parameter.copy_(p)
        if g is not gradient and grad_scale is not None:
            gradient.copy_(g)  # unscaled

    def _moments_of(
        self, optimizer: _Optimizer, group: _Group, parameter: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """As torch's step would have them, at home where they have one."""
        state: dict[str, Any] = optimizer.state[parameter]
        step = state.get("step", 0.0)
        looks = (step.dtype, step.device.type) if isinstance(step, torch.Tensor) else None
        if looks != (torch.float32, "cpu"):
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
        for name in _names(optimizer, group):
            home = self._home_of(optimizer, parameter, name)
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter) if home is None else home.zero_()
            elif home is not None:
                self._put(state, name, home)
        return state

    def _momentum_of(
        self, optimizer: _Optimizer, group: _Group, parameter: torch.Tensor
    ) -> tuple[torch.Tensor | None, bool]:
        """The buffer, and whether the step is the first one, which writes it."""
        if group["momentum"] == 0:
            return None, False
        state: dict[str, Any] = optimizer.state[parameter]
        home = self._home_of(optimizer, parameter, "momentum_buffer")
        is_first = state.get("momentum_buffer") is None
        if is_first:
            state["momentum_buffer"] = torch.empty_like(parameter) if home is None else home
        elif home is not None:
            self._put(state, "momentum_buffer", home)
        return state["momentum_buffer"], is_first

    def _home_of(
        self, optimizer: _Optimizer, parameter: torch.Tensor, name: str
    ) -> torch.Tensor | None:
        homes = self._homes[optimizer].get(parameter)
        if homes is not None and name not in homes:  # an option was changed since
            homes[name] = self._home(parameter)
        return None if homes is None else homes[name]

    def _follow_loads(self, optimizer: _Optimizer) -> None:
        """Let loaded state go to its place without passing through the device."""
        held: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def before(_: _Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            self.decide()
            held.clear()
            saved = [number for group in loaded["param_groups"] for number in group["params"]]
            ours = [p for group in optimizer.param_groups for p in group["params"]]
            entries = dict(loaded["state"])
            for number, parameter in zip(saved, ours, strict=False):
                if parameter in self._homes[optimizer] and number in entries:
                    held.append((parameter, dict(entries.pop(number))))
            return {**loaded, "state": entries}

        def after(_: _Optimizer) -> None:
            found = {**optimizer.state, **dict(held)}
            held.clear()
            optimizer.state.clear()
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                if parameter in found:
                    optimizer.state[parameter] = found.pop(parameter)
            optimizer.state.update(found)  # what is no parameter's
            self.adopt()

        optimizer.register_load_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_post_hook(after)


def _step_adam(
    group: _Group,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    grad_scale: torch.Tensor | None,
) -> None:
    beta1, beta2 = group["betas"]
    adam(
        [parameter],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
        [state["step"]],
        foreach=False,
        fused=True,
        grad_scale=grad_scale,
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=group["amsgrad"],
        beta1=float(beta1),
        beta2=float(beta2),
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _step_sgd(
    group: _Group,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    buffer: torch.Tensor | None,
    is_first: bool,
    grad_scale: torch.Tensor | None,
) -> None:
    # torch's own function would make the buffer, in memory, and take no group where some have one and others not.
    torch._fused_sgd_(
        [parameter],
        [gradient],
        [] if buffer is None else [buffer],
        weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]),
        lr=float(group["lr"]),
        dampening=float(group["dampening"]),
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=is_first,
        grad_scale=grad_scale,
    )
