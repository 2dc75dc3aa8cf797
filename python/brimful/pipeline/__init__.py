"""A model in stages, a thread for each device; the work is done by the C++ pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from brimful import _C, _random
from brimful.pipeline import _arguments, _stages
from brimful.pipeline._stage_names import StageNames
from brimful.sizer import NO_DATA, BatchDim, _scaler_tensors
from brimful.sizer._ladder import rungs_of
from brimful.sizer._loops import Looping

__all__ = ["Pipeline", "pop", "split_sequential", "stash"]

Stage = Callable[..., Any]


def stash(name: str, tensor: torch.Tensor | None) -> None:
    """Within a stage's forward: leave ``tensor``, or ``None``, for a later stage, which gets it by ``pop(name)``.

    It goes past the stages in between, within its microbatch, and its gradient comes back the same way. Raises
    ``ValueError`` if ``name`` was stashed in this microbatch already; what no stage has popped fails the step when the
    first microbatch has come through the last stage. ``torch.utils.checkpoint`` may be around it. Outside a pipeline
    it is left for the same thread's ``pop``, so that the model that is not cut runs as it is.
    """
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TypeError(f"stash takes a tensor (name: {name!r}, type: {type(tensor)})")
    _C._stash(_arguments.text("name", name), tensor)


def pop(name: str) -> torch.Tensor | None:
    """Within a stage's forward: what an earlier stage has stashed in this microbatch, once, on this stage's device.

    Raises ``ValueError`` if there is none of that name, or if a later stage has changed it in place.
    """
    return _C._pop(_arguments.text("name", name))


def split_sequential(
    model: torch.nn.Sequential, balance: Sequence[int]
) -> list[torch.nn.Sequential]:
    """Stages with as many of the model's layers each as ``balance`` says, in order; layers keep their names.

    Raises ``ValueError`` unless ``balance`` has positive numbers that add up to the number of layers.
    """
    if not isinstance(model, torch.nn.Sequential):
        raise TypeError(
            f"split_sequential cuts a torch.nn.Sequential (type: {type(model)}); cut another model by hand"
        )
    layers = list(model.named_children())
    balance = _arguments.balance(balance)
    if min(balance, default=0) < 1 or sum(balance) != len(layers):
        raise ValueError(
            "balance must be positive numbers that add up to the model's layers "
            f"(balance: {list(balance)}, layers: {len(layers)})"
        )
    stages, begin = [], 0
    for count in balance:
        stage = torch.nn.Sequential().train(model.training)
        for name, layer in layers[begin : begin + count]:
            stage.add_module(name, layer)
        stages.append(stage)
        begin += count
    return stages


def _drawn_elsewhere() -> int:
    """A number that is another one once Python's or numpy's random numbers have been drawn from."""
    return hash(_random.marks())


def _splitter(batch_dim: BatchDim, size_fn: Any, split_fn: Any) -> _C.Splitter:
    return _C.Splitter(
        batch_dim=batch_dim,
        size_fn=_arguments.function("size_fn", size_fn),
        split_fn=_arguments.function("split_fn", split_fn),
    )


def _microbatches(wanted: int | None, schedule: Any) -> int:
    if wanted is not None:
        return wanted
    return schedule.microbatches if isinstance(schedule, _C.Schedule) else 8


class Pipeline(Looping):
    """A model whose parts run at the same time, each on its device, on microbatches of a batch.

    ``stages`` are modules, or functions, in order: each takes what the one before it returned, as one argument, as in
    ``torch.nn.Sequential``. That may be a tensor, or a tuple, list, dict or dataclass of tensors and whatever else; the
    graph is cut between stages. Of a function the pipeline knows the parameters of modules that it is a method of, or
    that it has in its closure; one that uses others raises ``ValueError`` in its first step. ``devices`` names one
    device for each thread (by default that of each stage's parameters); with fewer devices than stages, a ``schedule``
    that gives a thread several, and a divisor of their number. Modules are moved to their device.

    Keywords of ``step(x, target, mask=mask)`` and ``forward(x, mask=mask)`` go to every stage whose forward names them
    (or takes ``**kwargs``), cut to its microbatch and on its device. They are cut as the batch is;
    ``kwargs_dim={"mask": 1}`` says where one of them has its rows, and ``{"mask": None}`` that all microbatches share
    it. One that no stage takes raises ``TypeError``, and so does an object that is neither cut (``register_split``) nor
    said to be whole. A batch or keyword that needs a gradient gets it when the step stands.

    ``schedule`` is one of "gpipe", "1f1b" and "zb_h2" for one stage a device, "zbv" and "dualpipev" for two, and
    "interleaved_1f1b", "looped_bfs", "zb_h1" and "forward_only" (for ``forward`` alone) for any number, a ``Schedule``,
    or a function that makes one of a number of microbatches. ``loss_fn(output, target)`` gets the last stage's output
    and returns the mean loss of its rows, or ``(mean loss, weight)``. A module that has parameters of its own, such as
    ``AdaptiveLogSoftmaxWithLoss``, is trained with the last stage, on its device; of a function the parameters are
    known as those of a stage are.

    Threads and queues are C++; the GIL is taken only inside a stage or ``loss_fn`` of Python, so that forwards of
    Python stages take turns, and their backwards run side by side. The caller's grad mode and autocast hold in the
    stages. ``threads_per_rank`` is the number of threads that a stage's CPU operators use; 0: the caller's, shared out.

    Stages that draw random numbers of one generator (on the CPU all of them) take turns, each with numbers of its own
    that follow from the caller's seed; who draws is found out, and the step in which it is, is repeated.

    When memory runs out in any stage, all stop, what the step has done is undone (gradients, buffers, random numbers),
    and it is repeated with twice the microbatches, at most ``max_retries`` times; later steps begin with what has
    fitted, and with fewer microbatches again when there is room. A ``Schedule`` is of one number of microbatches: its
    step is not repeated; a function of the number is.

    ``ladder="auto"`` lets a step that runs out with microbatches of one row (or under a ``Schedule``) recompute stages:
    they save nothing in their forward and run it again in their backward, bit-equal to a step with room; first the
    stage of that device which holds most, then all of them. Where that is not enough they are offloaded instead: what
    they save lies in a file (CPU), or on the host (CUDA). Later steps keep it until there is more room than then.
    ``ladder=["split", "recompute"]`` and ``["split", "offload"]`` allow one of the two; ``"split"`` and
    ``max_retries=0`` end with ``BatchTooLarge`` instead. ``recompute="all"``, or a list of stages' numbers, has it from
    the first step on. A stage that computes something else when it runs again, changes its input in place, or draws
    from Python's or numpy's random numbers is left alone, and the log names it. ``StageNote.recomputed`` and
    ``offloaded`` say which did.
    ``batch_norm`` says what to do about BatchNorm, which normalises every microbatch by itself, as in
    ``BatchSizer``; ``"rescale"`` moves running statistics once a step, as the whole batch does. ``batch_dim``, or
    ``size_fn`` and ``split_fn``, say how batch and target are cut, and ``scaler`` scales the loss's gradient, as there.

    With a ``group`` the ranks are processes: each gives its own rank's ``stages``, all on one device, and calls
    ``step`` and ``forward`` with the same batch. The group has gloo, and NCCL beside it for stages on CUDA devices
    (``init_process_group("cpu:gloo,cuda:nccl")``). Between them go tensors, numbers, texts, bytes, and tuples, lists,
    mappings and dataclasses of those; what is stashed travels with the messages. After each attempt they agree how it
    ended: a shortage on one is repeated by all, another failure raises ``RankFailed`` on the others, and no process
    waits for one that has failed. ``forward`` returns ``None`` where the last stage is not. ``tied`` names parameters
    of which other ranks have copies (an embedding and the last layer): they begin with the lowest rank's values, and
    each gets the sum of the copies' gradients. A copy that is not named is trained by itself: nothing can see it. In
    one process ``tied`` names all copies, ``{"words": [embedding.weight, head.weight]}``, for stages on different
    devices; stages on one device may share a parameter, which is not named.

    Stages in ``DistributedDataParallel`` (each with the group of its replicas) make a pipeline one of several replicas,
    each with its own rows: gradients are the exact weighted mean over the rows of all, buckets are launched behind a
    stage's last backward, and what fails on any rank of any replica is repeated, or raised, on all
    (docs/pipeline-processes.md).

    Ctrl-C, and whatever else a signal's handler raises, ends a call: no stage begins another action, stages of Python
    stop at their next line, and it is raised within a second, with everything as before the call. A stage that does not
    end in this second is abandoned: gradients that it still makes are dropped, and later calls raise ``RuntimeError``.

    One call at a time: a step within a step raises ``ValueError``.
    """

    _core: _C.Pipeline
    _named = "pipeline"
    #: Called after each step.
    _observers: tuple[Callable[[_C.Outcome], object], ...] = ()

    #: Beside those of wrapped stages.
    _reducers: tuple[_C.Reducer, ...] = ()

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        devices: Sequence[torch.device | str | int] | None = None,
        schedule: str | _C.Schedule | Callable[[int], _C.Schedule] = "1f1b",
        microbatches: int | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        max_retries: int = 8,
        ladder: str | Sequence[str] = "auto",
        recompute: str | Sequence[int] = (),
        threads_per_rank: int = 0,
        trace: bool = True,
        batch_norm: str = "warn",
        scaler: torch.amp.GradScaler | None = None,
        batch_dim: BatchDim = 0,
        size_fn: Callable[[Any], int] | None = None,
        split_fn: Callable[[Any, int, int], Any] | None = None,
        kwargs_dim: Mapping[str, BatchDim] | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        tied: Mapping[str, torch.nn.Parameter | Sequence[torch.nn.Parameter]] | None = None,
    ) -> None:
        stages = _arguments.stages(stages)
        schedule = _arguments.schedule(schedule)
        group = _arguments.group(group)
        copies = _arguments.copies_of(tied)
        if microbatches is not None:
            microbatches = _arguments.whole_number("microbatches", microbatches, 1)
        count = _microbatches(microbatches, schedule)
        chosen, parts, reducing = _stages.placed(stages, devices, schedule, count, loss_fn, group)
        self._stages, self._group = stages, group
        self._loss_fn = _arguments.function("loss_fn", loss_fn)
        taken = [names for *_, names in parts]
        self._takes_any = group is not None or None in taken
        self._keywords = {name for names in taken for name in names or ()}
        self._kwargs_dim = _arguments.mapping("kwargs_dim", kwargs_dim)
        self._require_taken(self._kwargs_dim)
        may_recompute, may_offload = rungs_of(ladder, ("split", "recompute", "offload"))
        self._core = _C.Pipeline(
            stages=parts,
            devices=chosen,
            schedule=schedule,
            microbatches=count,
            max_retries=_arguments.whole_number("max_retries", max_retries, 0),
            threads_per_rank=_arguments.whole_number("threads_per_rank", threads_per_rank, 0),
            trace=bool(trace),
            batch_norm=_arguments.text("batch_norm", batch_norm),
            scaler=_scaler_tensors(scaler, chosen[-1]),
            keepers=[_random.KEEPER],
            before_action=None,
            patience_s=1.0,
            splitter=_splitter(batch_dim, size_fn, split_fn),
            group=group,
            reducers=[*reducing, *self._reducers],
            tied=copies,
            recompute=may_recompute,
            offload=may_offload,
            recomputed=_arguments.recomputed(recompute),
            hidden_state=_drawn_elsewhere,
        )

    def _require_taken(self, names: Iterable[str]) -> None:
        for name in names:
            if not self._takes_any and name not in self._keywords:
                known = ", ".join(sorted(self._keywords)) or "none"
                raise TypeError(
                    f"no stage takes this keyword (name: {name}, taken: {known}); a stage names it in its forward"
                )

    def _cut_by(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], _C.Splitter] | None:
        """Keywords, and what cuts them."""
        self._require_taken(kwargs)
        if not kwargs:
            return None
        dims = {name: self._kwargs_dim.get(name, 0) for name in kwargs}
        return kwargs, _C.Splitter(batch_dim=dims)

    def step(self, batch: Any, /, target: Any = None, **kwargs: Any) -> _C.Outcome:
        """Add the gradients of one step to those of the stages' parameters.

        ``target`` may be ``None``. ``kwargs`` are for the stages that name them. What a stage raises is raised here,
        with a note, or a text, that says where, and ``BatchTooLarge`` if no number of microbatches fits; parameters,
        gradients, buffers and random numbers are then as before. A batch of fewer rows than microbatches, such as the
        last one of an epoch, has a row in each of as many as it can fill.

        ``NO_DATA`` in the place of a batch: this replica has none, while others have (``batches``); its stages get the
        gradients of the others. On all ranks of the replica alike.
        """
        loop = self._entered_loop()
        try:
            if batch is NO_DATA:
                outcome = self._core.step_without_data()
            else:
                outcome = self._core.step(batch, target, self._loss_fn, self._cut_by(kwargs))
        finally:
            if loop is not None:
                loop.note_step(self._core.at_end)
        for observe in self._observers:
            observe(outcome)
        return outcome

    def forward(self, batch: Any, /, **kwargs: Any) -> Any:
        """The last stage's output for all rows, without gradients; microbatches stream through the stages.

        Modules are as they are: call their ``eval`` first. Tensors of the microbatches are joined along dimension 0;
        what is no tensor is that of the first one.
        """
        return self._core.forward(batch, self._cut_by(kwargs))

    def _names(self) -> StageNames:
        numbers = list(range(len(self._stages)))
        if self._group is not None:
            rank = self._group.rank()
            numbers = [i for i, r in enumerate(self.schedule().rank_of_stage) if r == rank]
        return StageNames([_stages.own_modules(stage) for stage in self._stages], numbers)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters of the stages, each once, by their names in the model that was cut.

        Stages of ``split_sequential``, or of a model's own parts, keep the model's names; where two stages have the
        same name, each name has its stage's number in front, as in ``torch.nn.Sequential(*stages)``. Wrappers
        (``DistributedDataParallel``, ``torch.compile``) add nothing. Of a process of several those of its own stages;
        those of ``loss_fn`` are not among them.
        """
        return self._names().named_parameters()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters of the stages, each once, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """Parameters and buffers of the stages by the names of ``named_parameters``."""
        return self._names().state_dict(keep_vars=keep_vars)

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Take the values of a ``state_dict`` of this pipeline, or of the model that was cut.

        Returns the names that are missing, and those that no stage has; ``strict`` makes them a ``RuntimeError``. A
        process of several takes what its own stages have, and passes over the rest.
        """
        others = self._group is not None and self._group.size() > 1
        return self._names().load_state_dict(
            _arguments.mapping("state", state), strict=strict, others_have_theirs=others
        )

    def train(self, mode: bool = True) -> Pipeline:
        """Put the stages' modules in training, or not; returns the pipeline."""
        for stage in self._stages:
            for module in _stages.own_modules(stage):
                module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put the stages' modules in evaluation; returns the pipeline."""
        return self.train(False)

    def cancel(self) -> None:
        """End a call that is under way, from another thread: it raises ``RuntimeError``, with everything as before it.

        Does not wait. Nothing where there is no call. A stage that does not end within a second is abandoned, as after
        Ctrl-C.
        """
        self._core.cancel()

    def report(self) -> _C.Report:
        """What its steps have been on this process, as ``BatchSizer.report``: pieces are microbatches.

        Memory and limit are those of its fullest device. Calls of ``forward`` do not count.
        """
        return self._core.report()

    def trace(self) -> str:
        """The last step as JSON for Perfetto (ui.perfetto.dev) or chrome://tracing: measured beside planned.

        Planned is the schedule with the mean times of each stage's actions. Empty before the first step.
        """
        return self._core.trace()

    def trace_svg(self) -> str:
        """The last step as a picture: measured above planned, in milliseconds, with each rank's idle share.

        Of a process of several its own rank alone is measured. Empty before the first step.
        """
        return self._core.trace_svg()

    def progress(self) -> str:
        """What a call that is under way is doing: for each rank of this process its action, and since when.

        From any thread at any time, in a step that hangs too; waits for nothing. ``repr`` has it during a call.
        """
        return self._core.progress()

    def schedule(self) -> _C.Schedule:
        """The schedule of a step with the microbatches that were asked for; ``print`` draws it."""
        return self._core.schedule()

    def __repr__(self) -> str:
        return str(self._core)
