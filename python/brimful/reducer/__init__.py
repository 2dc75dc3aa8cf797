"""Data parallelism for a module; the work is done by the C++ reducer."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.utils._pytree import tree_map_only

from brimful import _C
from brimful._compat import optimizers_in_backward, skipped_by_dynamo
from brimful._process_end import is_out_of_memory, register, text_of
from brimful.reducer._before_optimizer import guard_optimizers_of
from brimful.reducer._before_saving import BeforeSaving
from brimful.reducer._comm_hook import builtin_hook, check_comm_hook
from brimful.reducer._join import InTorchsJoin, joining, not_joined
from brimful.reducer._mixed_precision import MixedPrecision, check_mixed_precision, wire_dtype_of
from brimful.reducer._torch_dcp import treat_as_torchs
from brimful.reducer._wrapping import (
    Contents,
    bucket_caps,
    buffers_agree,
    check_device,
    default_group,
    group_of,
    refuse_wrapped,
    require_both,
)

if dist.is_available():
    # It keeps the group that is the default one when it is imported, as its functions' default, and the first optimizer
    # imports it: then destroy_process_group would not end that group's threads.
    import torch.distributed.nn.functional

__all__ = ["DistributedDataParallel"]

_log = logging.getLogger("brimful")


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Takes the place of ``torch.nn.parallel.DistributedDataParallel``; a collective, all ranks construct together.

    In a plain loop gradients are the mean over the ranks when ``backward()`` returns, and the failure of another
    rank is raised from it as ``RankFailed`` or ``RankOutOfMemory``. Under a ``BatchSizer`` gradients are the exact
    weighted mean over all samples of all ranks, and a rank that runs out of memory is waited for.

    The arguments are those of torch's class:

    - Without effect, because what they ask for is always so: ``find_unused_parameters``,
      ``gradient_as_bucket_view``, ``static_graph``, ``batched_grad_copy``, ``skip_all_reduce_unused_params``,
      ``check_reduction``, ``dim``, ``output_device``, ``lazy_bucket_allocation`` (buckets exist from the start: a
      rank without memory drains them), and ``delay_all_reduce_named_params`` with ``param_to_hook_all_reduce``
      (every gradient is the mean when ``backward()`` returns).
    - ``device_ids``: one accelerator, which inputs are moved to. ``device_mesh``: of one dimension, instead of
      ``process_group``.
    - ``init_sync``: parameters (frozen ones too) and buffers begin as rank 0's. ``forward_sync_buffers``: buffers
      agree after every step that synchronises, not before a forward, so that no graph finds them changed in the
      middle; ``broadcast_buffers=False`` is ``forward_sync_buffers=False`` without buffers in ``init_sync``.
    - ``bucket_cap_mb_list``: caps of the first, second, ... bucket (of each dtype), the last one for all that follow.
      A gradient of the CPU that is reduced where it lies (from 4 MiB) takes an entry too.
    - ``mixed_precision``: torch's ``_MixedPrecision``. Parameters, gradients and the optimizer stay in float32, the
      module runs in ``param_dtype`` and returns what it returns. Gradients travel in ``reduce_dtype``, else in
      ``param_dtype``, unless ``wire_dtype`` is given. Buffers run in ``buffer_dtype`` and keep their own.
      A function under ``torch.utils.checkpoint`` must call modules: a parameter that it reads itself is float32 when it
      runs again. ``model.module(x)`` runs in float32.

    Beyond torch's arguments:

    - ``plan``: ``"auto"`` learns the order of buckets from the first backward and, unless ``bucket_cap_mb`` is given,
      on the CPU tries bucket sizes in the first steps and keeps the fastest; ``"ordered"`` only learns the order;
      ``"registration"`` never changes (deterministic for more than two ranks); or what ``plan`` of an earlier run was.
    - ``wire_dtype``: gradients travel in this dtype: ``torch.bfloat16`` halves the bytes of float32 gradients,
      ``torch.float32`` sums bfloat16 or float16 gradients without rounding on the way (one more copy of them).
    - ``error_feedback``: what rounding to ``wire_dtype`` took from a gradient is added to the next one.
    - ``gradient_predivide_factor``: in a plain loop, divide by this before the sum and by the rest after it.
    - ``check_updates=False``, on any rank: the ranks' parameters differ on purpose, and do not raise ``PlanMismatch``
      where they were not updated alike.

    What ``module._ddp_params_and_buffers_to_ignore`` names stays each rank's own. Unlike with torch's class:

    - ``no_sync`` is about the backwards that run inside it, whatever their forwards did.
    - ``backward(inputs=...)`` of all parameters is a step; of some, their gradients stay this rank's own.
    - Of several wrappers of a parameter the last one reduces it; the others raise ``RuntimeError`` where they would
      train. A module with a wrapper inside is a ``ValueError``.
    - ``p.grad`` is a view of a bucket. A program may keep it over later steps: it then gets memory of its own. A
      view of it (``p.grad.view(-1)``, ``p.grad.detach()``) does not; clone that.
    - After ``backward(create_graph=True)`` gradients have a graph. Of a loss of them, each rank derives its part,
      and the mean over the ranks is right where all ranks have the same loss of them.
    - Tensor hooks and post-accumulate hooks see this rank's gradient, before the mean (as in torch); so an
      optimizer must not step in one. Compiled autograd is refused; ``torch.compile`` in any place is not.
    - A copy (``copy.deepcopy``, pickle) is not connected to other ranks before its first training forward, which
      all ranks make together.

    ``state_dict()`` has torch's names, with the prefix ``module.``; ``model.module.state_dict()`` has none.

    Parameters that are added, replaced, unfrozen, resized or given another dtype or device afterwards make the next
    forward or backward raise ``PlanMismatch``, and ``RankFailed`` on the other ranks; frozen ones count as unused.

    Raises ``PlanMismatch`` on every rank if their models differ, ``ValueError`` if no parameter needs a gradient,
    one is on the meta device or the process group is not initialised, ``TypeError`` for parameters that are
    DTensors.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
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
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        plan: str = "auto",
        wire_dtype: torch.dtype | None = None,
        error_feedback: bool = False,
        gradient_predivide_factor: float | None = None,
        check_updates: bool = True,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self._belong_to_no_loop()
        _require_module(module)
        require_both(delay_all_reduce_named_params, param_to_hook_all_reduce)
        if mixed_precision is not None:
            check_mixed_precision(mixed_precision)
        self.mixed_precision = mixed_precision
        self.process_group: dist.ProcessGroup | None = group_of(process_group, device_mesh)
        self.module = module
        contents = Contents(module)
        self.parameters_to_ignore = contents.ignored
        self._input_device = check_device(contents.trainable, device_ids, output_device)
        self._show_as_torchs(dim, find_unused_parameters, static_graph)
        if mixed_precision is not None:
            wire_dtype = wire_dtype_of(mixed_precision, wire_dtype, contents.trainable)
        at_start, self.forward_sync_buffers = buffers_agree(broadcast_buffers, forward_sync_buffers)
        self._options: dict[str, Any] = {
            **bucket_caps(bucket_cap_mb, bucket_cap_mb_list),
            "plan": plan,
            "wire_dtype": wire_dtype,
            "error_feedback": error_feedback,
            "gradient_predivide_factor": gradient_predivide_factor,
            "check_updates": check_updates,
        }
        self._mixed = self._make_mixed()
        self._reducer: _C.Reducer | None = self._make_reducer(contents, init_sync, at_start)
        self._guard_state()
        register(self)

    def _belong_to_no_loop(self) -> None:
        # What a join has to do before each forward.
        self._before_forward: Callable[[DistributedDataParallel], None] | None = None
        # Called before each training forward.
        self._observers: tuple[Callable[[], object], ...] = ()
        # Says whether this rank is between two steps that the others make too.
        self.in_loop: Callable[[], bool] = _never
        # Says whether the other ranks are in a step; a BatchSizer takes it over.
        self.buckets_expected: Callable[[], bool] = _always

    def _show_as_torchs(self, dim: int, find_unused_parameters: bool, static_graph: bool) -> None:
        """Set what programs read of torch's class: as it was passed, or as it always is here."""
        index = None if self._input_device is None else self._input_device.index
        self.device_ids, self.output_device = None if index is None else [index], index
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = True

    def _make_reducer(self, contents: Contents, synchronise: bool, buffers_too: bool) -> _C.Reducer:
        buffers = contents.buffers if buffers_too or self.forward_sync_buffers else []
        self._places = buffers if self.forward_sync_buffers else []
        self._wrapped = dict(zip(contents.names, contents.trainable, strict=True))
        self._left_out = contents.frozen
        self._inside = frozenset(id(child) for child in self.module.modules())
        self._suspect = False  # something was registered in one of these modules
        self._in_backward = optimizers_in_backward()
        self.process_group = group_of(self.process_group)
        return _C.Reducer(
            contents.trainable,
            [place.tensor for place in buffers],
            self.process_group,
            names=contents.names,
            sparse=contents.sparse,
            renormalised=contents.renormalised,
            frozen=contents.frozen,
            broadcast_buffers=self.forward_sync_buffers,
            synchronise_at_start=synchronise,
            **self._options,
        )

    def _make_mixed(self) -> MixedPrecision | None:
        if self.mixed_precision is None:
            return None
        mixed = MixedPrecision(self.mixed_precision, self.module, self.parameters_to_ignore)
        mixed.last_as_long_as(self)
        return mixed

    @property
    def reducer(self) -> _C.Reducer:
        """The core. A copy of a model makes its own in its first training forward, all ranks together."""
        if self._reducer is None:
            self._reducer = self._make_reducer(Contents(self.module), False, True)
        return self._reducer

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None and self.process_group is not default_group():
            raise RuntimeError(
                "a process group of one's own cannot be copied or pickled (process_group: "
                f"{self.process_group}); copy model.module and wrap the copy, or wrap the module in the "
                "default process group"
            )
        state = self.__dict__.copy()
        state.update(
            process_group=None, _reducer=None, _places=[], _wrapped={}, _left_out=[], in_loop=_never
        )
        del state["buckets_expected"], state["_mixed"]
        state.update(_before_forward=None, _observers=(), _join_config=not_joined())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.buckets_expected = _always
        self._mixed = self._make_mixed()
        self._guard_state()
        register(self)

    def _guard_state(self) -> None:
        """A step on a device may end before its sums do."""
        if any(p.requires_grad and p.device.type != "cpu" for p in self.module.parameters()):
            self.module.register_state_dict_pre_hook(BeforeSaving(self))  # type: ignore[no-untyped-call]
            guard_optimizers_of(self)

    @skipped_by_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._before_forward is not None:
            self._before_forward(self)
        device = self._input_device
        if device is not None:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(device, non_blocking=True), (args, kwargs)
            )
        if not torch.is_grad_enabled():
            return self._run(args, kwargs)
        reducer = self.reducer
        for observe in self._observers:
            observe()
        reducer.prepare_forward()
        if (
            self._suspect
            or optimizers_in_backward() != self._in_backward
            or (self._left_out and any(p.requires_grad for p in self._left_out))
        ):
            self._require_unchanged()
        outputs = self._run(args, kwargs)
        if not _C._runs_again():  # whose buffers do not stay
            for i, (owner, key, tensor, name) in enumerate(self._places):
                if owner.get(key) is not tensor:
                    self._follow_buffer(i, owner.get(key), name)
        reducer.watch(outputs)
        return outputs

    @skipped_by_dynamo
    def _run(self, args: Any, kwargs: Any) -> Any:
        if self._mixed is None:
            return self.module(*args, **kwargs)
        return self._mixed.run(self.module, args, kwargs)

    def _follow_buffer(self, i: int, now: torch.Tensor | None, name: str) -> None:
        place = self._places[i]
        if now is None or not self.reducer.replace_buffer(place.tensor, now):
            _log.warning(
                "a buffer has another shape, dtype or device than at construction and is not made "
                "equal on all ranks (name: %s)",
                name,
            )
        if now is not None:
            self._places[i] = place._replace(tensor=now)

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
        """One step of a plain loop: an exception that leaves it is raised on the other ranks too, with its message."""
        self.reducer.begin_scope()
        try:
            yield
        except BaseException as error:
            self.reducer.end_scope_failed(is_out_of_memory(error), text_of(error))
            raise
        self.reducer.end_scope_ok()

    def regroup(
        self,
        group: dist.ProcessGroup,
        *,
        progress: int = 0,
        whole: bool = True,
        synchronise: bool = False,
    ) -> _C.Regrouped:
        """Go on with another group, in place, after a rank died or for one that joins; all its ranks call it together.

        ``progress``: the steps that this rank's parameters have taken; ``whole=False`` where a step was broken off in
        the middle. Returns the ranks' ``progress`` and ``whole``, and ``source``: the lowest whole rank of those that
        are furthest, from which the others need what they missed (``synchronise=True`` gives parameters and buffers to
        all there and then). Options, the learned plan, counters and gradients are kept; the old group is aborted.
        ``BatchSizer.regrouped()`` comes next; ``brimful.Fleet`` does all of it.

        Raises ``PlanMismatch`` where models differ, ``RankFailed`` where a rank of the new group fails meanwhile, and
        ``ValueError`` with a communication hook, which may hold the old group.
        """
        agreed = self.reducer.regroup(
            group, progress=progress, whole=whole, synchronise=synchronise
        )
        before, self.process_group = [self.process_group], group
        threading.Thread(target=before.clear, daemon=True).start()  # it may join works that hang
        return agreed

    def register_comm_hook(
        self, state: Any, hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
    ) -> None:
        """As in torch: ``hook(state, bucket: dist.GradBucket)`` returns a future of the mean over the ranks.

        All ranks register the same hook, before the first backward (``PlanMismatch`` otherwise). A hook that raises
        fails the step on every rank; if it raises again when its rank takes part with zeros, the group is broken.
        Sparse gradients do not pass it.
        """
        check_comm_hook(hook)
        self.reducer.register_comm_hook(
            state, hook, getattr(hook, "__qualname__", repr(type(hook)))
        )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's ``dist.BuiltinCommHookType``: ``ALLREDUCE`` or ``FP16_COMPRESS``."""
        self.register_comm_hook(None, builtin_hook(comm_hook_type))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` in one pass a bucket; equal on all ranks, does not synchronise the device.

        Call it after ``backward()`` or ``sizer.step()``; returns the norm before clipping.
        """
        return self.reducer.clip_grad_norm(float(max_norm), float(norm_type))

    def check_gradients(self) -> None:
        """Raise ``FloatingPointError`` that names the first parameter whose gradient is not finite.

        One pass a bucket; synchronises the device.
        """
        index = self.reducer.nonfinite_gradient()
        if index is not None:
            raise FloatingPointError(
                f"a gradient is not finite (parameter: {self.reducer.names[index]}, step: "
                f"{self.reducer.counters.steps - 1}); look at the loss and the learning rate, or clip"
            )

    @property
    def plan(self) -> str:
        """The bucket plan in use, as JSON, for ``plan=`` of another run."""
        return self.reducer.plan

    def telemetry(self) -> dict[str, Any]:
        """What the last step did with its time: ``_ms`` times, bytes on the wire, the straggler, and each bucket.

        Does not synchronise. Empty before the first step.
        """
        times = self.reducer.times()
        return _as_dict(times[-1]) if times else {}

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        treat_as_torchs(DistributedDataParallel)
        return super().named_children()

    def save_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write the last steps (at most 64) as a trace for Perfetto and chrome://tracing, one process a rank."""
        _C._write_file(os.fsencode(path), self.reducer.chrome_trace())

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside ``no_sync()``; may be set, as torch's may."""
        return self.reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self.reducer.sync = sync

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Uneven data in a plain loop over one wrapped module, as torch's ``join``; a step that all ranks make costs no
        collective more, except a barrier beside backward on the CPU.

        A rank that leaves the block makes the others' calls with them, adding nothing, until all have left. Then every
        rank gets the parameters and buffers of the highest rank that made the last step; optimizer state stays each
        rank's own, and gradients are empty. ``divide_by_initial_world_size=False``: gradients
        are the mean over the ranks that still have data. Ranks count alike whatever their numbers of samples:
        ``BatchSizer`` weights samples, takes several modules, and needs no ``join``.

        ``throw_on_early_termination``: as soon as one rank has left, all raise RuntimeError before the next forward.
        Each forward asks all ranks for that, so all ranks make the same forwards. As with torch it is needed where
        forward makes collectives of its own (``SyncBatchNorm``); without it these wait for a rank that has left until
        the group's timeout.
        """
        if not enable:
            yield
            return
        with joining(self, not divide_by_initial_world_size, throw_on_early_termination):
            yield

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's ``Join([model, optimizer])``; takes its ``divide_by_initial_world_size``.

        As with torch's class, each forward of a rank is one of every rank's, with one backward behind it unless it runs
        under ``no_sync()`` or ``torch.no_grad()``. Unlike there, a rank that has left gets the others' mean as its
        gradients, so that an optimizer which is joined steps its part of the parameters with it.
        """
        return InTorchsJoin(self, not kwargs.get("divide_by_initial_world_size", True))

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return self.process_group

    def _require_unchanged(self) -> None:
        try:
            self._compare(Contents(self.module))
        except Exception as error:
            if self.reducer.owes:  # in a plain loop: the other ranks are in this step
                self.reducer.publish_failure(False, text_of(error))
            raise
        self._suspect = False
        self._in_backward = optimizers_in_backward()

    def _compare(self, now: Contents) -> None:
        for name, parameter in zip(now.names, now.trainable, strict=True):
            if self._wrapped.get(name) is parameter:
                continue
            change = "replaced" if name in self._wrapped else "added or unfrozen"
            raise _C.PlanMismatch(
                f"a parameter was {change} after its module was wrapped (parameter: {name}); wrap the "
                "module again, on all ranks"
            )

    @property
    def stop(self) -> bool:
        """Whether all ranks stop after the last step of a plain loop, since one was asked to: see ``request_stop``.

        Under a ``BatchSizer`` ``Outcome.stop`` says it.
        """
        return self.reducer.stop

    @property
    def buckets_launched(self) -> int:
        """Buckets that were launched in the step that runs."""
        return self.reducer.launched

    def zero_grad(self, set_to_none: bool = True) -> None:
        try:
            self._settle()
        except _C.RankFailed:
            if not self.reducer.is_broken:
                raise  # the next forward says of a broken group that it is, too
        super().zero_grad(set_to_none)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Names (as in ``module.state_dict()``) of what stays each rank's own; call it before wrapping."""
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)  # type: ignore[assignment]

    def _set_static_graph(self) -> None:
        """Nothing to do: any graph is taken."""

    def _settle(self) -> None:
        """Let the other ranks know of a step that died here, if none did yet."""
        if self._owes():
            self.reducer.prepare_forward()
            if torch.is_grad_enabled():
                self.reducer.watch(())

    def _owes(self) -> bool:
        return self._reducer is not None and self._reducer.owes


def _require_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"only a torch.nn.Module can be wrapped (type: {type(module)})")
    refuse_wrapped(module, (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel))


def _always() -> bool:
    return True


def _never() -> bool:
    return False


def _as_dict(times: _C.StepTimes) -> dict[str, Any]:
    def fields(value: object) -> dict[str, Any]:
        return {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}

    return {**fields(times), "buckets": [fields(bucket) for bucket in times.buckets]}
