"""torch's ``mixed_precision=``: float32 parameters and gradients, forward and backward in another dtype.

While the wrapper's forward runs, modules hold differentiable casts in the place of their parameters. Autograd's cast
brings the gradient back to the parameter's dtype, where the reducer waits for it, and nothing of the casts outlives the
graph. A checkpointed block runs again in backward, outside of that forward: a hook on every module casts there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from brimful._compat import skipped_by_dynamo

_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype")


def check_mixed_precision(config: Any) -> None:
    """Raises unless `config` has what torch's ``_MixedPrecision`` has."""
    for field in _DTYPES:
        if not hasattr(config, field):
            raise TypeError(
                f"mixed_precision lacks a field (field: {field}, type: {type(config).__name__}); pass "
                "torch.nn.parallel.distributed._MixedPrecision(param_dtype=..., reduce_dtype=..., "
                "buffer_dtype=...)"
            )
        dtype = getattr(config, field)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"a field of mixed_precision must be a torch.dtype or None ({field}: {dtype!r})"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"mixed precision is for real floating dtypes ({field}: {dtype}); pass torch.bfloat16 "
                "or torch.float16"
            )
    if getattr(config, "keep_low_precision_grads", False):
        raise NotImplementedError(
            "gradients have their parameter's dtype (keep_low_precision_grads: True); leave it out"
        )


def wire_dtype_of(
    config: Any, wire: torch.dtype | None, parameters: list[torch.nn.Parameter]
) -> torch.dtype | None:
    """The dtype in which gradients travel: torch reduces in ``reduce_dtype``, else in ``param_dtype``."""
    if config.reduce_dtype is not None and wire is not None:
        raise ValueError(
            f"two dtypes are given for the reduction (mixed_precision.reduce_dtype: {config.reduce_dtype}, "
            f"wire_dtype: {wire}); leave one of them out"
        )
    dtype = wire or config.reduce_dtype or config.param_dtype
    return None if all(p.dtype == dtype for p in parameters) else dtype


class MixedPrecision:
    """The casts of one wrapped module. `ignored`: names of parameters and buffers that stay as they are."""

    def __init__(self, config: Any, module: torch.nn.Module, ignored: frozenset[str]) -> None:
        self._param_dtype: torch.dtype | None = config.param_dtype
        self._buffer_dtype: torch.dtype | None = config.buffer_dtype
        casts_all = getattr(config, "cast_forward_inputs", True)
        self._casts_inputs = casts_all or getattr(config, "cast_root_forward_inputs", False)
        self._ignored = ignored
        self._hooks = {child: _Hook(self, name) for name, child in module.named_modules()}
        self._handles: list[RemovableHandle] = []
        self.open: list[_Swapped] = []  # of calls in backward
        for child, hook in self._hooks.items():
            _require_no_script(child, hook.name)
        for child, hook in self._hooks.items():
            _remove_dead_hooks(child)
            self._handles.append(child.register_forward_pre_hook(hook.enter))
            self._handles.append(child.register_forward_hook(hook.leave, always_call=True))

    def last_as_long_as(self, owner: object) -> None:
        """The hooks go when `owner` does."""
        finalize(owner, _remove, self._handles).atexit = False

    @skipped_by_dynamo
    def run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """``module(*args, **kwargs)`` in the lower precision; its outputs are as the module returns them."""
        while self.open:  # a backward was interrupted
            self.open.pop().restore()
        if self._casts_inputs and self._param_dtype is not None:
            args, kwargs = _cast_tensors((args, kwargs), self._param_dtype)
        swapped = self.swap(module, "")
        try:
            return module(*args, **kwargs)
        finally:
            swapped.restore()

    @skipped_by_dynamo
    def swap(self, module: torch.nn.Module, prefix: str) -> _Swapped:
        """Puts casts in the place of all that `module` and what is in it hold, each tensor cast once."""
        swapped = _Swapped()
        casts: dict[int, torch.Tensor] = {}
        try:
            for name, child in module.named_modules(prefix=prefix):
                hook = self._hooks.get(child)
                if hook is not None:
                    if hook.low:
                        continue
                    hook.low = True
                    swapped.hooks.append(hook)
                if isinstance(child, torch.nn.RNNBase):
                    swapped.keep_flat_weights(child)
                to = _to_of_sparse if getattr(child, "sparse", False) is True else torch.Tensor.to
                swapped.parameters += self._cast(
                    child._parameters, name, self._param_dtype, casts, to
                )
                swapped.buffers += self._cast(child._buffers, name, self._buffer_dtype, casts)
        except BaseException:
            swapped.restore()
            raise
        return swapped

    @skipped_by_dynamo
    def _cast(
        self,
        tensors: dict[str, Any],
        prefix: str,
        dtype: torch.dtype | None,
        casts: dict[int, torch.Tensor],
        to: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = torch.Tensor.to,
    ) -> list[_Place]:
        places: list[_Place] = []
        if dtype is None:
            return places
        for key, tensor in tensors.items():
            if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                continue
            if self._ignored and (f"{prefix}.{key}" if prefix else key) in self._ignored:
                continue
            low = casts.get(id(tensor))
            if low is None:
                low = casts[id(tensor)] = to(tensor, dtype)
            places.append(_Place(tensors, key, tensor, low))
        for place in places:
            tensors[place.key] = place.low
        return places


class _Place(NamedTuple):
    owner: dict[str, Any]
    key: str
    tensor: torch.Tensor
    low: torch.Tensor


class _Swapped:
    """What was put aside, and how it comes back."""

    def __init__(self) -> None:
        self.hooks: list[_Hook] = []
        self.parameters: list[_Place] = []
        self.buffers: list[_Place] = []
        self._flat: list[tuple[torch.nn.RNNBase, Any, Any]] = []

    def keep_flat_weights(self, rnn: torch.nn.RNNBase) -> None:
        """A recurrent module lists its weights again when they have changed; it is to keep none of the casts."""
        self._flat.append((rnn, rnn._flat_weights, rnn._flat_weight_refs))

    @skipped_by_dynamo
    def restore(self) -> None:
        for owner, key, tensor, low in self.parameters:
            if owner.get(key) is low:
                owner[key] = tensor
        for owner, key, tensor, low in self.buffers:
            now = owner.get(key)
            if now is low:
                with torch.no_grad():  # always: batch_norm writes without a trace in the version
                    tensor.copy_(low)
                owner[key] = tensor
            elif now is not None and now.dtype == low.dtype:  # the forward has replaced it
                owner[key] = now.to(tensor.dtype)
        for rnn, weights, references in self._flat:
            rnn.__dict__["_flat_weights"] = weights
            rnn.__dict__["_flat_weight_refs"] = references
        for hook in self.hooks:
            hook.low = False


class _Hook:
    """On one module: a call of it in backward, outside of the wrapper's forward, casts what it holds."""

    def __init__(self, mixed: MixedPrecision | None, name: str) -> None:
        self.low = False  # casts are in place
        self.name = name
        self.mixed = mixed  # None: of a copy of the module, which has no owner
        self._swapped: _Swapped | None = None

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, str]]:
        return _Hook, (None, self.name)

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        if not self.low:
            self._swap(module)

    def leave(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        if self._swapped is not None:
            self._restore()

    @skipped_by_dynamo
    def _swap(self, module: torch.nn.Module) -> None:
        if self.mixed is not None and torch._C._current_graph_task_id() != -1:
            self._swapped = self.mixed.swap(module, self.name)
            self.mixed.open.append(self._swapped)

    @skipped_by_dynamo
    def _restore(self) -> None:
        swapped, self._swapped = self._swapped, None
        if self.mixed is not None and swapped in self.mixed.open:
            self.mixed.open.remove(swapped)
            swapped.restore()


class _ToOfSparse(torch.autograd.Function):
    """A cast whose gradient may be sparse: autograd's own would make it strided, and fails."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return tensor.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


def _to_of_sparse(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _ToOfSparse.apply(tensor, dtype)  # type: ignore[no-any-return]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _require_no_script(module: torch.nn.Module, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "mixed_precision cannot replace the parameters of a TorchScript module (module: "
            f"{name or type(module).__name__}); leave it unscripted, or cast it yourself"
        )


def _remove_dead_hooks(module: torch.nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, _Hook) and owner.mixed is None:
                del hooks[key]


def _cast_tensors(parts: Any, dtype: torch.dtype) -> Any:
    """Floating point tensors of any structure in `dtype`."""

    def cast(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(dtype) if part.is_floating_point() else part
        if isinstance(part, PackedSequence):
            return part.to(dtype=dtype) if part.data.is_floating_point() else part
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.init}
            changed = {name: _cast_tensors(value, dtype) for name, value in values.items()}
            return dataclasses.replace(part, **changed)
        return part

    return tree_map(cast, parts, is_leaf=lambda part: isinstance(part, PackedSequence))
