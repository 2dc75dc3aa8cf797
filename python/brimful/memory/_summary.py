"""A step of training, run for what it takes of memory and undone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from brimful import _C
from brimful._modules import unwrapped
from brimful._process_end import is_out_of_memory
from brimful.memory._limit_plan import limit_plan
from brimful.memory._module_spans import ModuleRows, ModuleSpans, SavedBytes
from brimful.sizer._unchanged import Unchanged

__all__ = ["summary"]

LossFn = Callable[[Any, Any], Any]


def summary(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    train: bool = True,
    autocast: torch.dtype | bool | None = None,
    by_call: bool = False,
    batch_dim: Any = 0,
    size_fn: Callable[[Any], int] | None = None,
    split_fn: Callable[[Any, int, int], Any] | None = None,
    limit: int | None = None,
) -> _C.StepSummary:
    """Run steps with this batch, and return what they take of memory, module by module; then undo them.

    A step is ``loss_fn(model, batch).backward()`` from empty gradients, and ``optimizer.step()`` where there is an
    optimizer; it is measured when gradients and optimizer state have been made once. Without ``loss_fn`` the model is
    called with the batch (a tuple or list: its positional, a dict: its keyword arguments) and its outputs are summed.
    With ``train=False`` it is the forward alone, in ``eval()`` and without gradients. ``autocast`` is a dtype, or
    ``True`` for the device's own, and is in force around the forward.

    Each row of ``modules`` counts the module and all that is inside it, all of its calls, or with ``by_call`` one call
    (modules that do not run then have no row): ``inputs`` and ``outputs`` are the shapes of the last call's tensors,
    ``multiply_adds`` half the operations that ``torch.utils.flop_counter`` counts in forward, ``activation_bytes`` what
    its forwards left in memory, ``saved_bytes`` what they saved for backward and no module had saved before,
    ``forward_peak_bytes`` and ``backward_peak_bytes`` the most that the device held in all while it ran. ``peak_bytes``
    is the step's, to the byte on the CPU. ``predicted_bytes`` is what steps with a few rows had said of it (batches of
    four rows and more; ``None`` where they follow no law, or a CUDA allocator is not torch's own), ``margin_bytes``
    what that may be short by (on CUDA: the share that follows no line in the rows), ``workspaces_unknown`` that
    cuDNN's benchmark mode tries algorithms of which it knows nothing, ``largest_rows`` the largest batch that stays
    within ``limit_bytes`` (``memory.set_limit``; on CUDA without one what the device has). As text it is a table, in a
    notebook too; ``to_dict()`` is plain.

    Parameters, gradients, buffers, the optimizer, random numbers (torch's, Python's, numpy's), hooks, modes and the
    batch are as before afterwards, also where it raises; copies of the batch and the buffers, and with an optimizer of
    parameters and its state, are held meanwhile and not counted. A data-parallel wrapper is left out: other ranks take
    no part.

    ``batch_dim``, ``size_fn`` and ``split_fn`` are a ``BatchSizer``'s. With ``limit``, a number of bytes,
    ``limit_plan`` is what a ``BatchSizer`` would do to stay within it: pieces, or what it recomputes and offloads of
    single rows. The step itself runs without that limit.

    Raises ``ValueError`` for a batch without rows and for a loss that needs no gradient, ``TypeError`` for other types,
    and what the model raises. From one thread, with no other that allocates; waits for the device.
    """
    _check(model, loss_fn, optimizer, autocast)
    splitter = _C.Splitter(batch_dim=batch_dim, size_fn=size_fn, split_fn=split_fn)
    rows = splitter.rows_of(batch)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be a positive whole number of bytes (limit: {limit!r})")
    if limit is not None and not train:
        raise ValueError("a plan for a limit is one of training (train: False); leave limit out")
    if rows < 1:
        raise ValueError(f"there is nothing to measure in a batch without rows (rows: {rows})")
    step = _Step(unwrapped(model), loss_fn or _sum_of_outputs, optimizer, train, autocast)
    found = _C.StepSummary()
    found.rows, found.device, found.mode = rows, str(step.device), step.mode
    with (
        _collected_between_steps(),
        Unchanged(step.model, batch, optimizer, step.device) as unchanged,
    ):
        step.model.train(train)
        uncounted = unchanged.bytes
        steps = _C._SmallSteps(step.device)
        _run_small(steps, step, batch, rows, splitter, unchanged)
        steps.look(rows, _tensors(batch), unchanged.tensors())
        steps.predict(found)
        try:
            _measure_modules(found, step, batch, uncounted, unchanged, by_call)
            _measure_step(found, step, batch, unchanged, steps)
        except Exception as error:
            _add_what_fits(error, steps, found)
            raise
        steps.look_beyond(found)
        if limit is not None:
            unchanged.between_runs()
            found.limit_plan = limit_plan(
                step.model,
                step.device,
                step.run_between,
                found,
                lambda begin, end: splitter.slice(batch, rows, begin, end),
                batch,
                steps.peak_bytes,
                limit,
                unchanged.bytes,
            )
    return found


def _add_what_fits(error: Exception, steps: Any, found: _C.StepSummary) -> None:
    if not is_out_of_memory(error):
        return
    steps.look_beyond(found)
    if found.largest_rows is not None:
        error.add_note(f"the largest batch that fits: {found.largest_rows} rows")


def _check(
    model: object, loss_fn: object, optimizer: object, autocast: torch.dtype | bool | None
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module (type: {type(model)})")
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(f"parameters have no shape yet ({lazy[0]}); run the model once before")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable (type: {type(loss_fn)})")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer (type: {type(optimizer)})")
    if autocast is not None and not isinstance(autocast, bool | torch.dtype):
        raise TypeError(f"autocast must be a dtype, a bool or None (type: {type(autocast)})")


@contextmanager
def _collected_between_steps() -> Iterator[None]:
    """What the program has left in cycles is not freed in the middle of a step, as if the step had done it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _sum_of_outputs(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    return sum(t.sum() for t in tensors if t.is_floating_point() or t.is_complex())


class _Step:
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer | None,
        train: bool,
        autocast: torch.dtype | bool | None,
    ) -> None:
        self.model = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.mode = "train" if train else "eval"
        self._loss_fn, self._optimizer, self._train = loss_fn, optimizer if train else None, train
        self._autocast = autocast
        if autocast:
            dtype = torch.get_autocast_dtype(self.device.type) if autocast is True else autocast
            self.mode += f", {str(dtype).removeprefix('torch.')}"

    def run(
        self,
        batch: Any,
        part: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext(),
    ) -> None:
        """`part` is entered around forward, backward and optimizer."""
        gc.collect(0)  # cycles of the step before: all that is younger than the last collection
        with torch.set_grad_enabled(self._train):
            with part("forward"), self._casting():
                loss = self._loss_fn(self.model, batch)
            if not self._train:
                return
            loss = loss[0] if isinstance(loss, tuple) else loss
            if not isinstance(loss, torch.Tensor):
                raise TypeError(f"loss_fn must return a tensor (type: {type(loss)})")
            if not loss.requires_grad:
                raise ValueError(
                    "the loss needs no gradient, so there is no backward to measure (requires_grad: False); "
                    "use train=False"
                )
            with part("backward") as in_backward:
                if isinstance(in_backward, ModuleSpans):
                    in_backward.follow(loss)
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
            if self._optimizer is not None:
                with part("optimizer"):
                    # Not the step that schedulers and sizers put in its place.
                    type(self._optimizer).step(self._optimizer)

    def run_between(self, batch: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Forward and backward alone."""

        @contextmanager
        def part(name: str) -> Iterator[None]:
            if name == "forward":
                begin()
            try:
                yield
            finally:
                if name == "forward":
                    end()

        optimizer, self._optimizer = self._optimizer, None
        try:
            self.run(batch, part)
        finally:
            self._optimizer = optimizer

    def _casting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        dtype = self._autocast if isinstance(self._autocast, torch.dtype) else None
        return torch.autocast(self.device.type, dtype=dtype, enabled=self._autocast is not False)


def _run_small(
    steps: _C._SmallSteps,
    step: _Step,
    batch: Any,
    rows: int,
    splitter: _C.Splitter,
    unchanged: Unchanged,
) -> None:
    """Nothing is known of steps where a few rows cannot be run."""

    def step_with(few: int) -> Callable[[], None]:
        unchanged.between_runs()
        piece = splitter.slice(batch, rows, 0, few)
        return lambda: step.run(piece)

    # A model that takes whole batches only raises: the whole batch shows what is wrong.
    with suppress(Exception):
        steps.run(rows, step_with)
    unchanged.between_runs()


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim() > 0]


def _measure_modules(
    found: _C.StepSummary,
    step: _Step,
    batch: Any,
    uncounted: int,
    unchanged: Unchanged,
    by_call: bool,
) -> None:
    rows = ModuleRows(step.model, by_call)
    with SavedBytes(step.model, rows, batch) as saved:
        step.run(batch, saved.part)
    unchanged.between_runs()
    with ModuleSpans(step.model, rows, step.device, uncounted) as spans:
        step.run(batch, spans.part)
    unchanged.between_runs()
    found.modules = _C._charge_modules(rows.rows, spans.spans)


def _measure_step(
    found: _C.StepSummary,
    step: _Step,
    batch: Any,
    unchanged: Unchanged,
    steps: _C._SmallSteps,
) -> None:
    uncounted = unchanged.bytes
    peaks = {"forward": 0, "backward": 0, "optimizer": 0}

    class Part(AbstractContextManager[None]):
        def __init__(self, name: str) -> None:
            self._name, self._scope = name, _C._PeakScope(step.device)

        def __enter__(self) -> None:
            self._scope.__enter__()

        def __exit__(self, *error: object) -> None:
            self._scope.__exit__(*error)
            peaks[self._name] = self._scope.peak_bytes - uncounted

    found.used_bytes = _C._memory_used_bytes(step.device) - uncounted
    steps.look(found.rows, _tensors(batch), unchanged.tensors())
    with _C._PeakScope(step.device) as whole:
        steps.run_whole(found.rows, lambda: step.run(batch, Part))
    found.peak_bytes = whole.peak_bytes - uncounted
    found.forward_peak_bytes = peaks["forward"]
    found.backward_peak_bytes = peaks["backward"]
    found.optimizer_peak_bytes = peaks["optimizer"]
