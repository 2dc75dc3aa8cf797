"""A model in stages, a thread for each device; the work is done by the C++ pipeline."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from brimful import _C
from brimful._modules import batch_norms
from brimful.sizer import BatchDim, _numpy_state, _scaler_tensors, _set_numpy_state

__all__ = ["Pipeline", "pop", "split_sequential", "stash"]

Stage = Callable[[Any], Any]


def stash(name: str, tensor: torch.Tensor) -> None:
    """Within a stage's forward: leave ``tensor`` for a later stage, which gets it by ``pop(name)``.

    It goes past the stages in between, within its microbatch, and its gradient comes back the same way. Raises
    ``ValueError`` outside a stage, or if ``name`` was stashed in this microbatch already.
    """
    _C._stash(name, tensor)


def pop(name: str) -> torch.Tensor:
    """Within a stage's forward: what an earlier stage has stashed in this microbatch, once, on this stage's device.

    Raises ``ValueError`` outside a stage, or if there is none of that name.
    """
    return _C._pop(name)


def split_sequential(
    model: torch.nn.Sequential, balance: Sequence[int]
) -> list[torch.nn.Sequential]:
    """Stages with as many of the model's layers each as ``balance`` says, in order; layers keep their names.

    Raises ``ValueError`` unless ``balance`` has positive numbers that add up to the number of layers.
    """
    layers = list(model.named_children())
    if min(balance, default=0) < 1 or sum(balance) != len(layers):
        raise ValueError(
            "balance must be positive numbers that add up to the model's layers "
            f"(balance: {list(balance)}, layers: {len(layers)})"
        )
    stages, begin = [], 0
    for count in balance:
        stage = torch.nn.Sequential()
        for name, layer in layers[begin : begin + count]:
            stage.add_module(name, layer)
        stages.append(stage.train(model.training))
        begin += count
    return stages


def _devices(stages: Sequence[Any], devices: Sequence[Any] | None) -> list[torch.device]:
    if devices is None:
        found = []
        for stage in stages:
            parameters = stage.parameters() if isinstance(stage, torch.nn.Module) else iter(())
            first = next(parameters, None)
            found.append(torch.device("cpu") if first is None else first.device)
        return found
    chosen = [torch.device(device) for device in devices]
    if not chosen or len(stages) % len(chosen) != 0:
        raise ValueError(
            "every device has the same number of stages "
            f"(stages: {len(stages)}, devices: {len(chosen)}); give as many devices as stages, or a divisor"
        )
    return chosen


def _microbatches(wanted: int | None, schedule: Any) -> int:
    if wanted is not None:
        return wanted
    return schedule.microbatches if isinstance(schedule, _C.Schedule) else 8


@contextlib.contextmanager
def _said_to_be_fixed(schedule: Any) -> Iterator[None]:
    """One schedule is of one number of microbatches: a shortage of memory cannot be met by more of them."""
    try:
        yield
    except _C.BatchTooLarge as error:
        if isinstance(schedule, _C.Schedule):
            error.add_note(
                f"the schedule is fixed (microbatches: {schedule.microbatches}), so no other number was tried; "
                "give one with more, or the name of a schedule, or a function of the number of microbatches"
            )
        raise


def _to_devices(stages: Sequence[Any], devices: Sequence[torch.device], schedule: Any) -> None:
    ranks = len(devices)
    folded = schedule in ("zbv", "dualpipev")  # the second half goes back over the ranks
    for index, stage in enumerate(stages):
        rank = min(index, len(stages) - 1 - index) if folded else index % ranks
        if isinstance(stage, torch.nn.Module):
            stage.to(devices[rank])


def _modules_of(function: Any) -> list[torch.nn.Module]:
    """Those that the function is a method of, or has in its closure."""
    cells = [getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # one that is still empty
            cells.append(cell.cell_contents)
    if isinstance(function, functools.partial):
        cells += [function.func, *function.args, *function.keywords.values()]
    inner = [m for cell in cells if inspect.isroutine(cell) for m in _modules_of(cell)]
    return [cell for cell in cells if isinstance(cell, torch.nn.Module)] + inner


def _parts(index: int, stage: Any) -> tuple[str, Any, list[Any], list[Any], list[Any]]:
    if not callable(stage):
        raise TypeError(f"a stage is a module or a function (stage: {index}, type: {type(stage)})")
    whole = isinstance(stage, torch.nn.Module)
    modules = [stage] if whole else _modules_of(stage)
    name = type(stage).__name__ if whole else getattr(stage, "__name__", type(stage).__name__)
    parameters = dict.fromkeys(p for module in modules for p in module.parameters())
    buffers = dict.fromkeys(b for module in modules for b in module.buffers())
    return name, stage, list(parameters), list(buffers), batch_norms(modules)


class Pipeline:
    """A model whose parts run at the same time, each on its device, on microbatches of a batch.

    ``stages`` are modules, or functions, in order: each takes what the one before it returned, as one argument, as in
    ``torch.nn.Sequential``. That may be a tensor, or a tuple, list, dict or dataclass of tensors and whatever else; the
    graph is cut between stages. Of a function the pipeline knows the parameters of modules that it is a method of, or
    that it has in its closure; one that uses others raises ``ValueError`` in its first step. ``devices`` names one
    device for each thread (by default that of each stage's parameters); with fewer devices than stages, a ``schedule``
    that gives a thread several, and a divisor of their number. Modules are moved to their device.

    ``schedule`` is one of "gpipe", "1f1b", "zb_h1" and "zb_h2" for one stage a device, "zbv" and "dualpipev" for two,
    and "interleaved_1f1b" and "looped_bfs" for any number. ``loss_fn(output, target)`` gets the last stage's output and
    returns the mean loss of its rows, or ``(mean loss, weight)``.

    Threads and queues are C++; the GIL is taken only inside a stage or ``loss_fn`` of Python, so that forwards of
    Python stages take turns, and their backwards run side by side. The caller's grad mode and autocast hold in the
    stages. ``threads_per_rank`` is the number of threads that a stage's CPU operators use; 0: the caller's, shared out.

    When memory runs out in any stage, all stop, what the step has done is undone (gradients, buffers, random numbers),
    and it is repeated with twice the microbatches, at most ``max_retries`` times; later steps begin with what has
    fitted. A ``Schedule`` is of one number of microbatches: its step is not repeated; a function of the number is.
    ``batch_norm`` says what to do about BatchNorm, which normalises every microbatch by itself, as in
    ``BatchSizer``; ``"rescale"`` moves running statistics once a step, as far as one batch does. ``batch_dim``, or
    ``size_fn`` and ``split_fn``, say how batch and target are cut, and ``scaler`` scales the loss's gradient, as there.

    With a ``group`` (gloo) the ranks are processes: each gives its own rank's ``stages`` and calls ``step`` and
    ``forward`` with the same batch. What moves between them are tensors. After each attempt they agree how it ended: a
    shortage on one is repeated by all, another failure raises ``RankFailed`` on the others, and no process waits for
    one that has failed. ``forward`` returns ``None`` where the last stage is not.

    One call at a time: a step within a step raises ``ValueError``.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        devices: Sequence[torch.device | str | int] | None = None,
        schedule: str | _C.Schedule | Callable[[int], _C.Schedule] = "1f1b",
        microbatches: int | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        max_retries: int = 8,
        threads_per_rank: int = 0,
        trace: bool = True,
        batch_norm: str = "warn",
        scaler: torch.amp.GradScaler | None = None,
        batch_dim: BatchDim = 0,
        size_fn: Callable[[Any], int] | None = None,
        split_fn: Callable[[Any, int, int], Any] | None = None,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        stages = list(stages)
        if not stages:
            raise ValueError("a pipeline has at least one stage (stages: 0)")
        chosen = _devices(stages, devices) if group is None else [torch.device("cpu")]
        if devices is not None and group is not None:
            raise ValueError(
                f"a process of a group has its stages on the CPU (devices: {devices}); leave devices out"
            )
        if devices is not None:
            _to_devices(stages, chosen, schedule)
        parts = [_parts(index, stage) for index, stage in enumerate(stages)]
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be callable (type: {type(loss_fn)})")
        self._stages = stages
        self._loss_fn = loss_fn
        self._schedule = schedule
        self._core = _C.Pipeline(
            stages=parts,
            devices=chosen,
            schedule=schedule,
            microbatches=_microbatches(microbatches, schedule),
            max_retries=min(max_retries, 0) if isinstance(schedule, _C.Schedule) else max_retries,
            threads_per_rank=threads_per_rank,
            trace=trace,
            batch_norm=batch_norm,
            scaler=_scaler_tensors(scaler, chosen[-1]),
            keepers=[(random.getstate, random.setstate), (_numpy_state, _set_numpy_state)],
            before_action=None,
            splitter=_C.Splitter(batch_dim=batch_dim, size_fn=size_fn, split_fn=split_fn),
            group=group,
        )

    def step(self, batch: Any, target: Any = None) -> _C.PipelineOutcome:
        """Add the gradients of one step to those of the stages' parameters.

        ``target`` may be ``None``. What a stage raises is raised here, with a note, or words, that say where, and
        ``BatchTooLarge`` if no number of microbatches fits; parameters, gradients, buffers and random numbers are then
        as before. ``ValueError`` for fewer rows than microbatches.
        """
        if self._loss_fn is None:
            raise TypeError("step needs a loss function (loss_fn: None); give one to Pipeline")
        with _said_to_be_fixed(self._schedule):
            return self._core.step(batch, target, self._loss_fn)

    def forward(self, batch: Any) -> Any:
        """The last stage's output for all rows, without gradients; microbatches stream through the stages.

        Modules are as they are: call their ``eval`` first. Tensors of the microbatches are joined along dimension 0.
        """
        with _said_to_be_fixed(self._schedule):
            return self._core.forward(batch)

    def trace(self) -> str:
        """The last step as JSON for Perfetto (ui.perfetto.dev) or chrome://tracing: measured beside planned.

        Planned is the schedule with the mean times of each stage's actions. Empty before the first step.
        """
        return self._core.trace()

    def schedule(self) -> _C.Schedule:
        """The schedule of a step with the microbatches that were asked for; ``print`` draws it."""
        return self._core.schedule()

    def __repr__(self) -> str:
        return str(self._core)
