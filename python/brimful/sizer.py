"""Batches that always fit; the work is done by the C++ sizer."""

from __future__ import annotations

import functools
import logging
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from brimful import _C
from brimful._optimizer_room import OptimizerRoom
from brimful.reducer import DistributedDataParallel, _is_out_of_memory, _mark_told, _words

__all__ = ["NO_DATA", "BatchSizer"]

Batch = TypeVar("Batch")
#: The dimension that holds rows, `None` for what has none, or entries of them that mirror the batch.
BatchDim = int | None | Mapping[Any, Any] | Sequence[Any]


class _NoData:
    """What a rank passes to ``BatchSizer.step`` when its data has ended and that of others has not."""

    def __repr__(self) -> str:
        return "brimful.NO_DATA"

    def __reduce__(self) -> str:
        return "NO_DATA"


NO_DATA = _NoData()


def _announced(batch: Any) -> Any:
    """The batch as the core takes it: `None` is no data there, and a batch that is none is a bad one."""
    return None if batch is NO_DATA else () if batch is None else batch


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


def _modules(model: Any) -> list[torch.nn.Module]:
    modules = [model] if isinstance(model, torch.nn.Module) else list(model)
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"model must be a module or a sequence of modules (type: {type(module)})"
            )
        for child in module.modules():
            if isinstance(child, torch.nn.parallel.DistributedDataParallel):
                raise TypeError(
                    "torch's DistributedDataParallel hangs the other ranks when one retries; "
                    "wrap the module in brimful.DistributedDataParallel instead"
                )
    return modules


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t.device == device)


def _checked(batch: Any, loss_fn: Any, split: Sequence[int] | None) -> list[int] | None:
    """The split as integers. Raises TypeError for arguments that are of no use."""
    if batch is None:
        raise TypeError("the batch is None; pass brimful.NO_DATA where this rank has none")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable (type: {type(loss_fn)})")
    if split is None:
        return None
    try:
        return [operator.index(rows) for rows in split]
    except TypeError:
        raise TypeError(f"split must be a sequence of row counts (split: {split!r})") from None


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for item in optimizers:
        if not isinstance(item, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer or a sequence of them (type: {type(item)})"
            )
    return optimizers


class BatchSizer:
    """Runs the batch you ask for in pieces that fit, with the exact gradient of the whole batch.

    ``model`` is what ``loss_fn`` gets: a module, a ``DistributedDataParallel``, or a sequence of them for several
    wrapped modules in one step. ``optimizer`` (one, or a sequence) is only looked at: you call its ``step`` and
    ``zero_grad`` yourself. Until its first step the memory that its state will take is in use already, so that sizes
    found before hold after it (torch's optimizers but LBFGS and Adafactor; the state itself is not touched).
    ``weight_fn(batch)`` gives a batch's weight beforehand where it is not its number of rows, such as its number of
    tokens. ``pieces`` is the split of the first batch; from then on a split is refined when memory runs out.
    ``lockstep`` (by default true if the model has SyncBatchNorm) makes all ranks run the same number of pieces, which
    collectives inside the model need; no rank can retry then.

    ``batch_dim`` says where a batch's rows lie: an int for all its tensors, ``None`` for what every piece gets whole,
    or entries that mirror the batch, in a sequence of the same length or in a dict by key, field or index (dimension 0
    where it says nothing). For a batch that ``step`` cannot split, ``size_fn(batch)`` gives the number of rows and
    ``split_fn(batch, begin, end)`` the piece that has some of them; in lockstep it may be asked for none.

    ``predict`` chooses the pieces by the memory that they will need, where the CPU has a limit: at the first batch of a
    shape, two, three and sixteen of its rows (more where a library rounds allocations up) are run forward and
    backward twice, with nothing left of it but what it allocated. ``loss_fn`` is called for that too. Of shapes that
    differ in one length, such as a sequence's, only a few are run. Without ``predict`` pieces are only refined when
    memory runs out.

    Not thread-safe. A module with BatchNorm normalises every piece by itself (ghost batch norm): its result depends on
    the split, and is reproducible with the same split.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        max_retries: int = 8,
        pieces: int = 1,
        weight_fn: Callable[[Any], float] | None = None,
        batch_dim: BatchDim = 0,
        size_fn: Callable[[Any], int] | None = None,
        split_fn: Callable[[Any, int, int], Any] | None = None,
        lockstep: bool | None = None,
        predict: bool = False,
    ) -> None:
        modules = _modules(model)
        wrapped = [
            child
            for m in modules
            for child in m.modules()
            if isinstance(child, DistributedDataParallel)
        ]
        parameters = list(dict.fromkeys(p for m in modules for p in m.parameters()))
        optimizers = _optimizers(optimizer)
        reduced = {p for w in wrapped for p in w.parameters()}
        asked = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        outside = [
            p for p in dict.fromkeys([*parameters, *asked]) if p.requires_grad and p not in reduced
        ]
        if not any(p.requires_grad for p in parameters):
            raise ValueError(
                "the model has no parameter that needs a gradient (parameters: 0); nothing can be trained"
            )
        buffers = list(dict.fromkeys(b for m in modules for b in m.buffers()))
        devices = list(dict.fromkeys(p.device for p in parameters if p.requires_grad))
        if lockstep is None:
            lockstep = any(
                isinstance(c, torch.nn.SyncBatchNorm) for m in modules for c in m.modules()
            )
        self._model = model
        self._parameters = parameters
        self._optimizers = optimizers
        self._device = devices[0]
        self._buffers = buffers
        self._room = OptimizerRoom(optimizers, self._device)
        self._consumed = 0
        for name, function in (
            ("weight_fn", weight_fn),
            ("size_fn", size_fn),
            ("split_fn", split_fn),
        ):
            if function is not None and not callable(function):
                raise TypeError(f"{name} is called with a batch ({name}: {function!r})")
        self._weight_fn, self._size_fn, self._split_fn = weight_fn, size_fn, split_fn
        # The core is no container to the garbage collector: what it holds must not lead back to it.
        this = weakref.ref(self)
        self._core = _C.BatchSizer(
            reducers=[w.reducer for w in dict.fromkeys(wrapped)],
            outside=outside,
            buffers=buffers,
            devices=devices,
            keepers=[(random.getstate, random.setstate), (_numpy_state, _set_numpy_state)],
            required_bytes=lambda: this()._required_bytes(),  # type: ignore[union-attr]
            holdings=lambda: this()._holdings(),  # type: ignore[union-attr]
            weight_fn=weight_fn and (lambda batch: this()._weight_fn(batch)),  # type: ignore[union-attr,misc]
            splitter=_C.Splitter(
                batch_dim=batch_dim,
                size_fn=size_fn and (lambda batch: this()._size_fn(batch)),  # type: ignore[union-attr,misc]
                split_fn=split_fn and (lambda *piece: this()._split_fn(*piece)),  # type: ignore[union-attr,misc]
            ),
            max_retries=max_retries,
            pieces=pieces,
            lockstep=lockstep,
            predict=predict,
        )
        self._loops = 0  # that have not come to their end
        for module in wrapped:
            module.buckets_expected = lambda: (sizer := this()) is None or sizer._core.expects_step
            module.in_loop = lambda: (
                (sizer := this()) is not None and sizer._core.expects_step and sizer._loops > 0
            )
        for item in optimizers:
            self._guard(item)

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an error inside `optimizer.step` a HalfStepError that the other ranks hear of."""
        inner = optimizer.step
        this = weakref.ref(self)

        @functools.wraps(optimizer.step.__func__)  # type: ignore[attr-defined]
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            sizer = this()
            try:
                if sizer is None:
                    return inner(*args, **kwargs)
                with sizer._room.stepping(optimizer, measure=not args and not kwargs):
                    return inner(*args, **kwargs)
            except (_C.RankFailed, _C.HalfStepError):
                raise
            except Exception as error:
                if sizer is None:
                    raise
                sizer._announce(error)
                half_done = _C.HalfStepError(
                    f"the optimizer failed in the middle of its step ({_words(error)}); parameters "
                    "may be half updated: load a checkpoint"
                )
                _mark_told(half_done)
                raise half_done from error

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def step(
        self, batch: Any, loss_fn: Callable[[Any, Any], Any], *, split: Sequence[int] | None = None
    ) -> _C.Outcome:
        """Fill the gradients of one step; all ranks return, or raise, together.

        ``loss_fn(model, piece)`` returns the mean loss of the piece, or ``(mean loss, weight)``. ``batch`` is
        ``NO_DATA``, a tensor, or a structure of tensors with the same first dimension (or see ``batch_dim``): tuples,
        namedtuples, lists, dicts and other mappings, dataclasses. A ``PackedSequence`` and a jagged tensor are split by
        sequences, a sparse tensor (COO, CSR) by rows. A list of anything else with an entry for each row is cut; all
        else, such as strings, ``None`` and 0-dim tensors, is in every piece. ``split`` (rows per piece)
        repeats a recorded ``Outcome.split``. Gradients must be empty before the call.

        If another rank failed, raises ``RankFailed`` (``RankOutOfMemory`` if it could not split further); this rank's
        own error is raised as it is, and ``BatchTooLarge`` if no split fits here. Parameters, buffers and RNG are then
        as before the call. Waits once for the device.
        """
        data = None if batch is NO_DATA else batch
        sizes, error = None, None
        try:
            sizes = _checked(batch, loss_fn, split)
            self._room.keep()
        except Exception as caught:  # must fail the step, not this call: the other ranks wait
            error = caught
        try:
            outcome = self._core.step(data, loss_fn, self._model, sizes, error)
        except BaseException as told:
            _mark_told(told)
            raise
        self._consumed += data is not None
        return outcome

    def plan(self, batch: Any, loss_fn: Callable[[Any, Any], Any]) -> _C.Plan | None:
        """The pieces and the peak of a step with this batch on this rank, as ``predict`` would choose them.

        Runs a few rows where it has not seen a batch of this shape; parameters, buffers and RNG stay as they are and
        gradients must be empty. The peak is that of forward and backward, or of the optimizer's step if it takes more,
        in bytes, of the CPU; ``parameter_bytes``, ``gradient_bytes``, ``optimizer_bytes`` (state), ``buffer_bytes`` and
        ``activation_bytes`` (the rest) add up to it. None where memory follows no law that is known, the batch has
        fewer than three rows, or the model is not on the CPU.
        """
        _checked(batch, loss_fn, None)
        self._room.keep()
        return self._core.plan(batch, loss_fn, self._model)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch | _NoData]:
        """Yield the loader's batches, then ``NO_DATA`` while other ranks have some.

        All ranks leave the loop after the same step. Looks one batch ahead, and begins with one
        exchange between the ranks. Every batch must be given to ``step``.
        """
        core = self._core
        if self._loops > 0 and core.expects_step:
            # The loop before was left: by all ranks, or the others wait in its next step.
            self._tell(False, "it left its loop over data and began another one")
        self._loops = 0
        error: BaseException | None = None
        following: Any = None
        try:
            source = iter(loader)
            following = next(source, NO_DATA)
        except BaseException as caught:
            error = caught
        any_rank = core.begin_loop(_announced(following))
        if error is not None:
            self._fail(error)
        self._loops += any_rank
        while any_rank:
            current = following
            try:
                following = next(source, NO_DATA) if current is not NO_DATA else NO_DATA
            except BaseException as caught:
                self._fail(caught)
            core.announce_next(_announced(following))
            calls = core.calls
            yield current
            if core.calls == calls:
                raise RuntimeError(
                    f"a batch was left out (steps: {core.steps}); call sizer.step for every batch"
                )
            any_rank = not core.at_end
        self._loops = 0

    def _fail(self, error: BaseException) -> None:
        self._announce(error)
        _mark_told(error)
        raise error

    def _announce(self, error: BaseException) -> None:
        """Tell the other ranks, which wait in their next step; nobody does after the last one."""
        self._tell(_is_out_of_memory(error), _words(error))

    def _tell(self, out_of_memory: bool, words: str) -> None:
        if self._core.at_end or self._core.world_size == 1:
            return
        try:
            self._core.announce_failure(out_of_memory, words)
        except _C.RankFailed as broken:
            logging.getLogger("brimful").warning("nobody heard of this rank's failure: %s", broken)

    def _required_bytes(self) -> int:
        held = self._holdings()
        return sum(held[name] for name in ("parameters", "gradients", "optimizer_state"))

    def _holdings(self) -> dict[str, int]:
        states = [
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        gradients = _bytes([p for p in self._parameters if p.requires_grad], self._device)
        return {
            "parameters": _bytes(self._parameters, self._device),
            "gradients": gradients,
            "optimizer_state": _bytes(states, self._device) + self._room.kept_bytes(self._device),
            "buffers": _bytes(self._buffers, self._device),
            "optimizer_step": gradients + self._room.step_bytes if self._optimizers else 0,
        }

    def state_dict(self) -> dict[str, float]:
        """What a resumed job needs to start with the sizes found, as plain numbers.

        ``consumed`` counts the batches that were stepped; the one looked ahead is not among them.
        """
        return {**self._core.state(), "consumed": float(self._consumed)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Raises ``ValueError`` if ``state`` is not what ``state_dict`` gave."""
        self._core.load_state({name: float(value) for name, value in state.items()})
        self._consumed = int(state.get("consumed", 0))
