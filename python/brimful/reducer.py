"""Data parallelism for a module; the work is done by the C++ reducer."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from brimful import _C

if dist.is_available():
    # It keeps the group that is the default one when it is imported, as its functions' default, and the first optimizer
    # imports it: then destroy_process_group would not end that group's threads.
    import torch.distributed.nn.functional

__all__ = ["DistributedDataParallel"]

_EXIT_PATIENCE_MS = 2000
_live: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "the default process group is not initialised (process_group: None); call "
            "torch.distributed.init_process_group first, or pass process_group"
        )
    world = dist.group.WORLD
    assert world is not None
    return world


def _trainable(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter, bool]]:
    """Name, parameter, and whether its gradient is sparse, of what takes part; each parameter once."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    found = []
    seen = set()
    for module_name, child in module.named_modules():
        sparse = isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse
        for name, parameter in child.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            if not parameter.requires_grad or full_name in ignored or parameter in seen:
                continue
            if type(parameter.data).__name__ == "DTensor":
                raise TypeError(
                    f"DTensor parameters are reduced by whoever sharded them (parameter: {full_name}); "
                    "do not wrap a module of FSDP2 or tensor parallelism in DistributedDataParallel"
                )
            seen.add(parameter)
            found.append((full_name, parameter, sparse))
    return found


def _left_out(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that need no gradient now; the ignored ones are nobody's concern."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [
        p for name, p in module.named_parameters() if not p.requires_grad and name not in ignored
    ]


class DistributedDataParallel(torch.nn.Module):
    """Takes the place of ``torch.nn.parallel.DistributedDataParallel``; a collective, all ranks construct together.

    In a plain loop gradients are the mean over the ranks when ``backward()`` returns, and the failure of another rank
    is raised from it as ``RankFailed`` or ``RankOutOfMemory``. Under a ``BatchSizer`` gradients are the exact weighted
    mean over all samples of all ranks, and a rank that runs out of memory is waited for.

    The arguments are those of torch's class. Without effect, because what they ask for is always so:
    ``find_unused_parameters``, ``gradient_as_bucket_view``, ``static_graph``, ``batched_grad_copy``,
    ``skip_all_reduce_unused_params``, ``check_reduction``, ``dim`` and ``lazy_bucket_allocation`` (buckets exist from
    the start: a rank without memory drains them). Buffers agree after every step, not before a forward
    (``broadcast_buffers``). Refused: ``mixed_precision``, ``delay_all_reduce_named_params``,
    ``param_to_hook_all_reduce`` and ``device_mesh``.

    Parameters that are added, replaced, unfrozen, resized or given another dtype or device afterwards make the next
    forward or backward raise ``PlanMismatch``, and ``RankFailed`` on the other ranks; frozen ones count as unused.

    Raises ``PlanMismatch`` on every rank if their models differ, ``ValueError`` if no parameter needs a gradient or the
    process group is not initialised, ``TypeError`` for parameters that are DTensors.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        super().__init__()
        refused = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
            "device_mesh": device_mesh,
            "bucket_cap_mb_list": bucket_cap_mb_list,
        }
        for name, value in refused.items():
            if value is not None:
                raise NotImplementedError(
                    f"DistributedDataParallel does not take this argument (name: {name})"
                )
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"one process drives one device (device_ids: {device_ids}); start one process per device"
            )
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"only a torch.nn.Module can be wrapped (type: {type(module)})")
        self.process_group: dist.ProcessGroup | None = _process_group(process_group)
        self.module = module
        self.device = (
            torch.device("cuda", device_ids[0])
            if device_ids and isinstance(device_ids[0], int)
            else None
        )
        trainable = _trainable(module)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        cap = 25.0 if bucket_cap_mb is None else float(bucket_cap_mb)
        self.reducer = _C.Reducer(
            [parameter for _, parameter, _ in trainable],
            [buffer for name, buffer in module.named_buffers() if name not in ignored],
            self.process_group,
            names=[name for name, _, _ in trainable],
            sparse=[sparse for _, _, sparse in trainable],
            bucket_cap_mb=cap,
            first_bucket_cap_mb=min(1.0, cap),
            broadcast_buffers=broadcast_buffers if broadcast_buffers is not None else True,
            synchronise_at_start=init_sync,
        )
        self._wrapped = {name: parameter for name, parameter, _ in trainable}
        self._left_out = _left_out(module)
        self._inside = frozenset(id(child) for child in module.modules())
        self._suspect = False  # something was registered in one of these modules
        # Says whether this rank is between two steps that the others make too.
        self.in_loop: Callable[[], bool] = lambda: False
        # Says whether the other ranks are in a step; a BatchSizer takes it over.
        self.buckets_expected: Callable[[], bool] = lambda: True
        _live.add(self)
        _install_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.device is not None:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(self.device, non_blocking=True), (args, kwargs)
            )
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self.reducer.prepare_forward()
        if self._suspect or (self._left_out and any(p.requires_grad for p in self._left_out)):
            self._require_unchanged()
        outputs = self.module(*args, **kwargs)
        self.reducer.watch(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients only accumulate while this is open; whether a backward synchronises is decided when it runs."""
        before = self.reducer.sync
        self.reducer.sync = False
        try:
            yield
        finally:
            self.reducer.sync = before

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of a plain loop: an exception that leaves it is raised on the other ranks too, with its words."""
        self.reducer.begin_scope()
        try:
            yield
        except BaseException as error:
            self.reducer.end_scope_failed(_is_out_of_memory(error), _words(error))
            raise
        self.reducer.end_scope_ok()

    def _require_unchanged(self) -> None:
        for name, parameter, _ in _trainable(self.module):
            if self._wrapped.get(name) is parameter:
                continue
            change = "replaced" if name in self._wrapped else "added or unfrozen"
            error = _C.PlanMismatch(
                f"a parameter was {change} after its module was wrapped (parameter: {name}); wrap the "
                "module again, on all ranks"
            )
            if self.reducer.owes:  # in a plain loop: the other ranks are in this step
                self.reducer.leave_word(False, _words(error))
            raise error
        self._suspect = False

    @property
    def buckets_left(self) -> int:
        """Buckets that have left in the step that runs."""
        return self.reducer.launched

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._settle()
        super().zero_grad(set_to_none)

    def _settle(self) -> None:
        """Let the other ranks know of a step that died here, if none did yet."""
        if self.reducer.owes:
            self.reducer.prepare_forward()
            if torch.is_grad_enabled():
                self.reducer.watch(())


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def _mark_told(error: BaseException) -> None:
    """The other ranks have heard of this error: nobody is to announce it again."""
    with suppress(AttributeError):
        error._brimful_told = True  # type: ignore[attr-defined]


def _was_told(error: BaseException) -> bool:
    return isinstance(error, _C.RankFailed) or getattr(error, "_brimful_told", False)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _announce(error: BaseException | None) -> None:
    """The process ends: whatever it owes leaves now, with the error's words."""
    if error is not None and _was_told(error):
        return
    for model in list(_live):
        reducer = model.reducer
        try:
            if error is None and not reducer.owes:
                if model.in_loop():  # they find the group broken, and these words
                    reducer.leave_word(False, "its process ended between two steps")
                continue
            memory = error is not None and _is_out_of_memory(error)
            words = (
                _words(error) if error is not None else "its process ended in the middle of a step"
            )
            if model.buckets_expected():
                reducer.announce_failure(memory, words, _EXIT_PATIENCE_MS)
            else:  # the others are elsewhere, and find the group broken when this process is gone
                reducer.leave_word(memory, words)
        except Exception as unheard:
            print(f"brimful: could not announce this rank's failure: {unheard}", file=sys.stderr)


def _end() -> None:
    """Before the interpreter ends: tell what is owed, then join the process groups' threads.

    These may hold tensors of Python, and a thread that needs an interpreter that is gone ends the process.
    """
    _announce(None)
    _C._release_groups()
    for model in list(_live):
        model.process_group = None


_hooks_installed = False


def _install_hooks() -> None:
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object] = (
        sys.excepthook
    )

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        sys.stderr.flush()
        _announce(error)

    sys.excepthook = excepthook
    atexit.register(_end)
    register_module_parameter_registration_hook(_suspect)
    register_module_module_registration_hook(_suspect)
    register_optimizer_step_pre_hook(lambda optimizer, *_: _settle_before(optimizer))


def _suspect(module: torch.nn.Module, *_: object) -> None:
    for model in list(_live):
        if id(module) in model._inside:
            model._suspect = True


def _settle_before(optimizer: torch.optim.Optimizer) -> None:
    """Models that owe the others a step and share a parameter with `optimizer` tell them now."""
    owing = [model for model in list(_live) if model.reducer.owes]
    if not owing:
        return
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    for model in owing:
        if not stepped.isdisjoint(model.parameters()):
            model._settle()
