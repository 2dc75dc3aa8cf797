"""Batches that always fit; the work is done by the C++ sizer."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from brimful import _C, _random
from brimful._modules import batch_norms, entries_of, unwrapped
from brimful._process_end import mark_reported, text_of
from brimful.reducer import DistributedDataParallel, _torch_ddp
from brimful.sizer import _pairs, _trial
from brimful.sizer._by_length import NO_LABELS, ByLength, LengthFn, RowsByLength, TrimFn
from brimful.sizer._host_state import HostState, can_leave
from brimful.sizer._ladder import LadderModules, has_state, rungs_of
from brimful.sizer._loops import NO_DATA, Looping
from brimful.sizer._loss_rules import LossRules, Use
from brimful.sizer._optimizer_room import OptimizerRoom
from brimful.sizer._packed import counted, whole_of
from brimful.sizer._parts import Parts
from brimful.sizer._sharded import local

__all__ = ["NO_DATA", "BatchSizer"]

Batch = TypeVar("Batch")
#: The dimension that holds rows, `None` for what has none, or entries of them that mirror the batch.
BatchDim = int | None | Mapping[Any, Any] | Sequence[Any]


class _Notes(Protocol):
    def note(self, outcome: _C.Outcome | None) -> None: ...


#: Generators' states that a step captures, and numbers that an optimizer's kernels wrap in tensors.
_BESIDE_OPTIMIZER_BYTES = 16384
_FRAGMENTS_BYTES = 32 << 20  # more than the segments in which torch's allocator has small blocks


def _is_compiled(modules: Iterable[torch.nn.Module]) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules
    )


def _scaler_tensors(scaler: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the scaler's methods change in place; made here if nothing was scaled yet."""
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler (type: {type(scaler)})")
    if not scaler.is_enabled():
        return None
    with _C._Unlimited():
        scaler.scale(torch.zeros((), device=device))
    return scaler._scale, scaler._growth_tracker  # type: ignore[return-value]


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


def _require_callable(**functions: Callable[..., Any] | None) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable ({name}: {function!r})")


def _by_length(
    how: bool | str | LengthFn, trim_fn: TrimFn | None, weight_fn: Any, few: bool, whole_rows: bool
) -> ByLength | None:
    if how is False or how is None:
        if trim_fn is not None:
            raise ValueError(
                "trim_fn is for rows by length (by_length: False); pass by_length=length_fn with it"
            )
        return None
    if not whole_rows:
        raise ValueError(
            "by_length cannot be combined with batch_dim, size_fn, split_fn or lockstep (by_length: given); leave "
            "by_length out, or the others"
        )
    return ByLength(how, trim_fn, weight_fn, few=few)


class BatchSizer(Looping):
    """Runs the batch you ask for in pieces that fit, with the exact gradient of the whole batch.

    ``model`` is what ``loss_fn`` gets: a module, a ``DistributedDataParallel``, or a sequence of them for several
    wrapped modules in one step. ``optimizer`` (one, or a sequence) is only looked at: you call its ``step`` and
    ``zero_grad`` yourself. Until its first step the memory that its state will take is in use already, so that sizes
    found before hold after it (of torch's own optimizers but LBFGS; the state itself is not touched).
    ``weight_fn(batch)`` gives a batch's weight beforehand where it is not its number of rows, such as its number of
    tokens. ``pieces`` is the split of the first batch, or ``piece_rows`` the rows that are known to fit, such as
    ``brimful.summary(...).largest_rows``; from then on a split is refined when memory runs out.
    ``lockstep`` (by default true if the model has SyncBatchNorm, or DTensor parameters) makes all ranks run the same
    number of pieces, which collectives inside the model need. No rank can retry then, but for ``fully_shard`` and
    tensor parallelism: a rank that fails issues the collectives that the others wait for. Their first step runs two
    rows up to four times.

    ``local=True`` says that parameters outside of wrapped modules stay each rank's own. Without it they raise
    ``ValueError`` in a process group of several ranks: the ranks' models would drift apart.

    ``batch_dim`` says where a batch's rows lie: an int for all its tensors, ``None`` for what every piece gets whole,
    or entries that mirror the batch, in a sequence of the same length or in a dict by key, field or index (dimension 0
    where it says nothing). For a batch that ``step`` cannot split, ``size_fn(batch)`` gives the number of rows and
    ``split_fn(batch, begin, end)`` the piece that has some of them; in lockstep it may be asked for none.

    ``predict`` chooses the pieces by the memory that they will need, where the CPU has a limit, or on CUDA by what
    torch's allocator will do in its pool as it is: at the first batch of a shape, two, three and sixteen of its
    rows (more where a library rounds allocations up) are run forward and backward twice, with nothing left of it
    but what it allocated. ``loss_fn`` is called for that too. Of shapes that differ in one length, such as a
    sequence's, only a few are run. Without ``predict`` pieces are only refined when memory runs out.

    Pieces grow again where there is room for what larger ones were seen to take, or must take at most. Under a limit of
    the CPU's memory a step whose optimizer would run out raises ``BatchTooLarge`` before it begins.

    ``equal_pieces`` (by default true if a module is compiled) keeps sizes few, since torch.compile compiles for each
    that it meets: up to a quarter more pieces where that makes all of them the same size, and after four such sizes, or
    where there is none, pieces of 1, 2, 3, 4, 6, 8, 12, 16, 24 ... rows.

    ``ladder="auto"`` lets a step whose single rows do not fit recompute modules in backward, or offload what they save
    to a file, instead of raising ``BatchTooLarge``: as few as needed, by measured times, and bit-equal to a step with
    room. ``["split", "recompute"]`` and ``["split", "offload"]`` allow one of them; ``"split"`` neither. Not in
    lockstep. With ``"state"`` in the list the state of an Adam, AdamW or SGD that has no room lies in a file (CPU) or
    on the host (CUDA), the largest parameters' first, and torch's fused kernel for the CPU steps it there.

    ``by_length`` puts a batch's rows in order of length, the longest first, trims each piece to its longest row, and
    chooses pieces by bytes and by measured time. ``True`` is for the usual dict of a token model (``input_ids``,
    ``attention_mask``, ``labels``, ...; padded right or left), ``"auto"`` leaves other batches as they are, and a
    function that gives the lengths of a batch's rows goes with ``trim_fn(batch, begin, end)``, which returns these rows
    trimmed. A mean loss then weighs as much as it has labels (``token_weight``; ``weight_fn`` is called with pieces,
    too), and rows without any are not run. A packed batch, one row that holds its sequences one after another, is cut
    between sequences. The first step that trims runs two rows in evaluation mode, whole and
    trimmed, and raises ``ValueError`` where their losses differ. Pieces are copies. ``Outcome.order`` has the rows.

    ``loss_rule`` says how the loss of a batch is composed of those of its pieces, where ``loss_fn`` returns a loss
    alone that is not a mean over rows. ``"find"`` finds it out: the first steps run four rows whole and in two pieces,
    in evaluation mode, and compare their gradients; pieces are weighted by the rule that agrees (rows, labels that
    count, a sum), the same on all ranks, and ``ValueError`` has the distances where none does. ``report()`` has the
    rule and what that took. ``"rows"`` and ``"sum"`` say it, and ``"whole"`` keeps batches whole.

    A module with BatchNorm normalises every piece by itself (ghost batch norm): its result depends on the split, and is
    reproducible with the same split. ``batch_norm`` says what to do about that: ``"warn"`` logs one warning that names
    the modules, at the first step that is split; with ``"freeze"`` only the first piece of a step updates running
    statistics; with ``"rescale"`` a step updates them once, by mean and variance of the whole batch, as one forward of
    it would (of modules that are compiled, cast or SyncBatchNorm each of k pieces moves them, by a momentum of 1 - (1 -
    m)^(1/k), or with ``momentum=None`` as the k-th part of a batch in the mean over all), and counts as one batch;
    ``"refuse"`` raises ``ValueError`` before a step that would be split runs, and ``BatchTooLarge``
    where memory runs out. Only modules that are in training, or keep no running statistics, count. Modules are as
    before after every step. SyncBatchNorm normalises a piece over all ranks: in ``lockstep`` the policies hold for it
    as well. Modules of other classes whose forward in training changes buffers that are called as statistics are
    (``running_mean``) are warned of once, and refused by ``"refuse"``. ``verify_split`` finds other modules that mix
    rows.

    Call it from one thread at a time: a step within a step, or a call while another thread is in one, raises
    ``ValueError`` and changes nothing.

    ``scaler`` (a ``torch.amp.GradScaler``) scales the step's gradients: ``loss_fn`` returns a loss that is not scaled,
    which is ``Outcome.loss`` too. Afterwards call ``scaler.unscale_(optimizer)`` to clip, ``scaler.step(optimizer)``
    and ``scaler.update()`` as ever. All ranks must have the same scale (``PlanMismatch``), and keep it: they find the
    same inf in the reduced gradients.

    ``model`` may hold torch's own ``DistributedDataParallel``. Constructing the sizer is then a collective. When each
    rank has all its gradients, the ranks agree over a gloo group of their own, and torch's class reduces after that: a
    shortage anywhere in forward and backward is repeated, but nothing is reduced during backward, and hooks on
    parameters run once more, on zeros. What fails inside torch's reduction (a communication hook, say) cannot be
    repeated: that rank raises ``RankFailed``, and the others do when their group's timeout is over.
    ``check_updates=False`` lets the ranks' parameters differ on purpose there.
    """

    _core: _C.BatchSizer
    _named = "sizer"
    #: Called after each step.
    _observers: tuple[Callable[[_C.Outcome], object], ...] = ()
    #: Batches that were stepped.
    _consumed = 0
    #: Of a batch that comes from no loop of this sizer.
    _sampler: _Notes | None = None
    #: Give and put back what `loss_fn` changes besides buffers and random numbers, for an attempt that is repeated.
    _keepers: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = ()

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        max_retries: int = 8,
        pieces: int = 1,
        piece_rows: int | None = None,
        weight_fn: Callable[[Any], float] | None = None,
        local: bool = False,
        batch_dim: BatchDim = 0,
        size_fn: Callable[[Any], int] | None = None,
        split_fn: Callable[[Any, int, int], Any] | None = None,
        lockstep: bool | None = None,
        predict: bool = False,
        equal_pieces: bool | None = None,
        batch_norm: str = "warn",
        scaler: torch.amp.GradScaler | None = None,
        ladder: str | Sequence[str] = "auto",
        by_length: bool | str | LengthFn = False,
        trim_fn: TrimFn | None = None,
        check_updates: bool = True,
        loss_rule: str | None = None,
    ) -> None:
        parts = Parts(model, optimizer)
        if not local:
            parts.require_reduced()
        parts.require_trained()
        devices = parts.devices()
        lockstep = parts.lockstep(lockstep)
        equal_pieces = _is_compiled(parts.children) if equal_pieces is None else equal_pieces
        whole_rows = (batch_dim, size_fn, split_fn, lockstep) == (0, None, None, False)
        self._by_length = _by_length(by_length, trim_fn, weight_fn, equal_pieces, whole_rows)
        self._model = model
        self._take_parts(parts)
        scaler_tensors = _scaler_tensors(scaler, devices[0])
        recompute, offload = rungs_of(ladder)
        self._host = HostState(parts.optimizers, devices[0]) if has_state(ladder) else None
        self._room = OptimizerRoom(parts.optimizers, self._host)
        _require_callable(weight_fn=weight_fn, size_fn=size_fn, split_fn=split_fn)
        self._weight_fn, self._size_fn, self._split_fn = weight_fn, size_fn, split_fn
        self._splitter = self._make_splitter(batch_dim)
        self._rules = self._make_rules(loss_rule, parts)
        self._core = self._make_core(
            parts,
            check_updates,
            max_retries=max_retries,
            pieces=pieces,
            piece_rows=piece_rows,
            lockstep=lockstep,
            predict=predict,
            equal_pieces=equal_pieces,
            batch_norm=batch_norm,
            scaler=scaler_tensors,
            ladder=LadderModules(parts.modules, devices[0]) if recompute or offload else None,
            recompute=recompute,
            offload=offload,
        )
        self._take_over(parts.wrapped)
        self._follow_optimizers()

    def _take_parts(self, parts: Parts) -> None:
        self._parameters = [local(p) for p in parts.parameters]
        self._buffers = parts.buffers()
        self._optimizers = parts.optimizers
        self._device = parts.devices()[0]
        self._wrapped_by_torch = parts.torch_ddp
        self._sharded, self._shards = parts.sharded, parts.shards
        self._gradient_bytes = parts.gradient_bytes(self._device)

    def _make_splitter(self, batch_dim: BatchDim) -> _C.Splitter:
        this = weakref.ref(self)
        return _C.Splitter(
            batch_dim=batch_dim,
            size_fn=self._size_fn and (lambda batch: this()._size_fn(batch)),  # type: ignore[union-attr,misc]
            split_fn=self._split_fn and (lambda *piece: this()._split_fn(*piece)),  # type: ignore[union-attr,misc]
        )

    def _make_rules(self, loss_rule: str | None, parts: Parts) -> LossRules | None:
        if loss_rule is None:
            return None
        if loss_rule == "find" and parts.sharded is not None:
            raise ValueError(
                "no rank of a sharded model can run a few rows alone to find a rule (loss_rule: find); say it: "
                "'rows', 'sum' or 'whole'"
            )
        for name, given in (("weight_fn", self._weight_fn), ("by_length", self._by_length)):
            if given is not None:
                raise ValueError(
                    f"loss_rule is for a loss whose pieces are weighted by nothing else ({name}: given); leave one of "
                    "them out"
                )
        this = weakref.ref(self)
        return LossRules(
            parts.modules,
            self._splitter,
            loss_rule,
            keepers=[
                (lambda: this()._kept(), lambda states: this()._put_back(states))  # type: ignore[union-attr]
            ],
        )

    def _make_core(self, parts: Parts, check_updates: bool, **options: Any) -> _C.BatchSizer:
        # The core is no container to the garbage collector: what it holds must not lead back to it.
        this = weakref.ref(self)
        return _C.BatchSizer(
            reducers=[w.reducer for w in parts.wrapped],
            adapters=[_torch_ddp.adapter(m, check_updates) for m in parts.torch_ddp],
            sharded=parts.sharded,
            outside=parts.outside,
            entries=entries_of(parts.modules),
            devices=parts.devices(),
            keepers=[
                _random.KEEPER,
                (lambda: this()._kept(), lambda states: this()._put_back(states)),  # type: ignore[union-attr]
            ],
            standing_tensors=lambda: this()._standing_tensors(),  # type: ignore[union-attr]
            optimizer_bytes=lambda: this()._optimizer_bytes(),  # type: ignore[union-attr]
            weight_fn=self._weight_fn and (lambda batch: this()._weight_fn(whole_of(batch))),  # type: ignore[union-attr,misc]
            splitter=self._splitter,
            local=True,  # else it was refused before
            batch_norms=batch_norms(parts.modules),
            finds_rule=self._rules is not None and self._rules.finds,
            state_may_leave=self._state_may_leave(),
            **options,
        )

    def _take_over(self, wrapped: Iterable[DistributedDataParallel]) -> None:
        """Let wrapped modules know which of their backwards belong to a step that all ranks make."""
        this = weakref.ref(self)
        for module in wrapped:
            module.buckets_expected = lambda: (sizer := this()) is None or sizer._core.expects_step
            module.in_loop = lambda: (
                (sizer := this()) is not None and sizer._core.expects_step and sizer._loops > 0
            )

    def _follow_optimizers(self) -> None:
        for optimizer in self._optimizers:
            self._guard(optimizer)
        if self._host is not None:
            this = weakref.ref(self)
            self._host.decide = lambda: (sizer := this()) is not None and sizer._place_state()
            if self._core.world_size > 1:
                self._host.be_alike()

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an error inside `optimizer.step` a HalfStepError of which the other ranks are informed."""
        inner = optimizer.step
        host = self._host  # outlives the sizer
        run = inner if host is None else functools.partial(host.step, optimizer, inner)
        this = weakref.ref(self)

        @functools.wraps(getattr(inner, "__func__", inner))  # a function where a scheduler put one
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            sizer = this()
            try:
                if sizer is not None:
                    sizer._room.release(optimizer)
                return run(*args, **kwargs)
            except (_C.RankFailed, _C.HalfStepError):
                raise
            except Exception as error:
                if sizer is None:
                    raise
                try:
                    sizer._core.fail_optimizer(text_of(error))
                except _C.HalfStepError as half_done:
                    mark_reported(half_done)
                    raise half_done from error

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def step(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        split: Sequence[int] | None = None,
        rungs: _C.StepRungs | None = None,
        accumulate: bool = False,
    ) -> _C.Outcome:
        """Fill the gradients of one step; all ranks return, or raise, together.

        ``loss_fn(model, piece)`` returns the mean loss of the piece, or ``(mean loss, weight)``; the step runs its
        backward. It may change the piece, and so the batch, in place: tensors that were seen to change in an earlier
        step are copied for a retry, and a retry that needs a copy that there is not raises ``ValueError``. ``batch`` is
        ``NO_DATA``, a tensor, or a structure of tensors with the same first dimension (or see ``batch_dim``): tuples,
        namedtuples, lists, dicts and other mappings, dataclasses. A ``PackedSequence`` and a jagged tensor are split by
        sequences, a sparse tensor (COO, CSR) by rows. NumPy arrays are cut as tensors are, and so is flex
        attention's ``BlockMask``. A list or tuple with an entry for each row is cut; tensors that are alike in it are
        columns where they have the batch's rows, or where there are three at most and nothing else shows it, and
        ``ValueError`` says where they could be both. Texts, lists of numbers and metadata in a list beside them, and
        samples (dicts, pairs) that hold what no column holds, show that entries are rows. Classes of the program's own
        are cut by their own indexing. Strings, numbers, ``None``, 0-dim tensors, functions and the like are in every
        piece; what else there is raises ``TypeError`` until ``register_split`` or ``batch_dim`` says how it is cut.
        ``split`` (rows per piece) repeats a recorded ``Outcome.split``, and ``rungs`` a recorded ``Outcome.rungs`` (of
        a sizer with a ladder). Gradients must be empty before the call.

        ``accumulate`` adds the step's gradients to those that there are, on all ranks alike: for several batches before
        one ``optimizer.step()``. While the step runs there is one copy more of the gradients.

        If another rank failed, raises ``RankFailed`` (``RankOutOfMemory`` if it could not split further); this rank's
        own error is raised as it is, and ``BatchTooLarge`` if no split fits here: it says what was tried, what takes
        the memory and what to try next; ``PlanMismatch`` if the ranks' states, scales or ``accumulate`` differ, or
        some ranks did not update their parameters since the step before (their values are compared then);
        ``ValueError`` on all ranks if no row of any rank counts, which weights that are tensors of a device show in a
        later step only. Parameters, buffers, RNG, the scaler and gradients to add to are then as before the call.
        Waits for no device where ranks agree between hosts, or there is one; else once.
        """
        data = None if batch is NO_DATA else batch
        sizes, error, rows, use = None, None, None, None
        trial, batched = _trial.current(), data
        try:
            batched = self._counted(data)
            sizes = _checked(batch, loss_fn, split)
            if self._shards is not None:
                self._shards.require_synced()
            rows = self._rows_by_length(data, loss_fn, check=split is None)
            use = self._rule_of(data, loss_fn)
            self._place_state()
            self._room.keep()
            if trial is not None and data is not None:
                plan = functools.partial(self.plan, batch, loss_fn, accumulate=accumulate)
                trial.before_step(self, plan, accumulate)
        except Exception as caught:  # must fail the step, not this call: the other ranks wait
            error = caught
        local = self._local(loss_fn if use is None else self._weighed(loss_fn, use))
        vote = use.vote if use is not None else _C._RuleVote() if self._rules is not None else None
        whole = use is not None and use.whole
        given = (batched, local, self._model, sizes, rungs, error, bool(accumulate), rows, vote)
        outcome = self._run(self._core.step, (*given, whole), trial)
        if use is not None and self._rules is not None:
            self._rules.learn(use)
        if rows is not None and not rows.order and outcome.weight == 0:
            raise ValueError(NO_LABELS.format(rows=rows.rows))
        return outcome

    def pair_step(
        self,
        batch: Any,
        embed_fn: Callable[[Any, Any], Any],
        pair_loss: Callable[..., Any],
        *,
        split: Sequence[int] | None = None,
        rungs: _C.StepRungs | None = None,
        accumulate: bool = False,
        own: bool = False,
        gathered_gradient: bool = True,
    ) -> _C.Outcome:
        """Fill the gradients of one step whose loss is over pairs of rows, such as a contrastive one.

        ``embed_fn(model, piece)`` returns the embeddings of a piece: a tensor, or a tuple or dict of tensors (towers),
        with a row for each row of the piece; one that has no floating values, such as labels, is gathered too.
        ``pair_loss(embeddings)`` gets the same structure with the rows of all ranks, in the order of the ranks, and
        returns a scalar, or several, which are added (``Outcome.losses`` has each). The pieces are embedded without a
        graph, the embeddings gathered, the loss and its gradients computed once, and the pieces run again with the
        random numbers of the first time. So the batch is as large as you like in the memory of a piece, the
        embeddings and the loss, and the gradient is that of the batch in one piece. It takes the time of one forward
        more.

        ``pair_loss`` is the same function of all rows on every rank, which differentiates it for its own rows. With
        ``own`` it is ``pair_loss(embeddings, rows)``, the mean over this rank's own rows, which the slice ``rows``
        says, and the step's loss is the mean over all ranks' rows; what one rank's loss says of the rows of another
        is added, unless ``gathered_gradient`` is False: then the rows of others are constants, and the gradient is
        that of no loss. Parameters of the model that ``pair_loss`` uses by itself, such as a temperature, get
        their gradient once.

        The first step checks that ``embed_fn`` gives the same embeddings in its second run, and ``pair_loss`` the same
        loss: ``ValueError``. It is raised as well for other rows than the piece has, embeddings without a graph, values
        that are not finite (without a ``scaler``), and a loss that is not the same on all ranks. A shortage in either
        pass repeats both, on all ranks if embeddings were gathered; one in the loss is repeated once, and then
        ``BatchTooLarge``. Not in ``lockstep``; ``predict`` and ``weight_fn`` have no part in it. All ranks call it in
        the same step. For all else see ``step``.
        """
        data = None if batch is NO_DATA else batch
        sizes, error = None, None
        pairs = _pairs.Pairs(embed_fn, pair_loss, own)
        try:
            _pairs.check(embed_fn, pair_loss, own, gathered_gradient)
            sizes = _checked(batch, embed_fn, split)
            self._place_state()
            self._room.keep()
        except Exception as caught:  # must fail the step, not this call: the other ranks wait
            error = caught
        local = self._local(pairs.embed)
        options = (bool(accumulate), bool(own), bool(gathered_gradient))
        given = (data, local, pairs.loss, self._model, sizes, rungs, error)
        return self._run(self._core.step_pairs, (*given, *options), None)

    def _run(
        self, step: Callable[..., _C.Outcome], given: tuple[Any, ...], trial: _trial.Trial | None
    ) -> _C.Outcome:
        """A step with what it is given, its batch first, and what follows one that stands.

        Once more where the optimizer's state is what a row's room is taken by.
        """
        outcome = None
        while outcome is None:
            loop = None
            try:
                loop = self._entered_loop()
                outcome = step(*given)
            except BaseException as reported:
                mark_reported(reported)
                if not self._makes_room(reported):
                    raise
            finally:
                if loop is not None:
                    loop.note_step(self._core.at_end)
            if outcome is None:
                self._room.keep()
        self._count(outcome, given[0] is not None)
        if trial is not None:
            trial.after_step(outcome)
        for observe in self._observers:
            observe(outcome)
        return outcome

    def _count(self, outcome: _C.Outcome, has_data: bool) -> None:
        """A batch once, however many steps its body makes of it."""
        noting, self._sampler = self._sampler, None
        loop = self._loop
        if loop is None:
            self._consumed += has_data
        else:
            self._consumed += has_data and not loop.is_counted
            loop.is_counted = True
            noting, loop.sampler = noting or loop.sampler, None
        if noting is not None:
            noting.note(outcome)

    def _makes_room(self, error: BaseException) -> bool:
        """For the rows that had none: the optimizers' state goes off the device."""
        alone = self._core.world_size == 1  # else the others were informed of a failure
        of_rows = isinstance(error, _C.BatchTooLarge) and bool(error.tried)
        return alone and of_rows and self._place_state(all_of_it=True)

    def _counted(self, batch: Any) -> Any:
        return batch if self._by_length is None else counted(batch)

    def _rows_by_length(
        self, batch: Any, loss_fn: Callable[[Any, Any], Any], *, check: bool = False
    ) -> RowsByLength | None:
        rows = None if self._by_length is None or batch is None else self._by_length.rows_of(batch)
        if rows is not None and not rows.order and self._core.world_size == 1:
            raise ValueError(
                f"no label of the batch counts (rows: {rows.rows}); leave the batch out"
            )
        if rows is not None and rows.order and check:
            kept = self._kept()
            try:
                self._by_length.check(rows, loss_fn, self._model)  # type: ignore[union-attr]
            finally:
                self._put_back(kept)
        return rows

    def _rule_of(self, batch: Any, loss_fn: Callable[[Any, Any], Any]) -> Use | None:
        """How the loss of this batch is composed; tried on a few rows where that is not known yet."""
        if self._rules is None or batch is None:
            return None
        plain = (
            unwrapped(self._model)
            if isinstance(self._model, torch.nn.Module)
            else [unwrapped(model) for model in self._model]
        )
        return self._rules.use(batch, lambda piece: loss_fn(plain, piece))

    def _weighed(self, loss_fn: Callable[[Any, Any], Any], use: Use) -> Callable[[Any, Any], Any]:
        def of_piece(model: Any, piece: Any) -> Any:
            return use.weighed(loss_fn(model, piece), piece, self._splitter.rows_of(piece))

        return of_piece

    def _kept(self) -> list[Any]:
        return [capture() for capture, _ in self._keepers]

    def _put_back(self, states: list[Any]) -> None:
        for (_, restore), state in zip(self._keepers, states, strict=True):
            restore(state)

    def _state_may_leave(self) -> bool:
        return (
            self._host is None and bool(self._optimizers) and all(map(can_leave, self._optimizers))
        )

    def _place_state(self, *, all_of_it: bool = False) -> bool:
        """Move state of the optimizers off the device where it has no room; returns whether it did."""
        if self._host is None:
            return False
        self._host.adopt()
        # Of several ranks no step can be repeated with more room, so that all the state goes at once.
        if self._core.world_size > 1:
            all_of_it = self._host.is_all_due or self._missing_bytes() > 0
        moved = self._host.make_room(self._missing_bytes, all_of_it=all_of_it)
        if moved:
            self._room.empty()
        return moved

    def _missing_bytes(self) -> int:
        """What the optimizers' next steps, and gradients, take beyond what the device has."""
        capacity = _C._memory_capacity_bytes(self._device)
        if capacity is None:
            return 0
        captured = sum(b.nbytes for b in self._buffers if b.device == self._device)
        needed = self._optimizer_bytes() + captured + _BESIDE_OPTIMIZER_BYTES
        if self._device.type == "cuda":  # where bytes that are free may lie in pieces of no use
            needed += _FRAGMENTS_BYTES + capacity // 32
        return _C._memory_used_bytes(self._device) + needed - capacity

    def _local(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return (
            _torch_ddp.local(loss_fn, self._wrapped_by_torch) if self._wrapped_by_torch else loss_fn
        )

    def plan(
        self, batch: Any, loss_fn: Callable[[Any, Any], Any], *, accumulate: bool = False
    ) -> _C.Plan | None:
        """The pieces and the peak of a step with this batch on this rank, as ``predict`` would choose them.

        Runs a few rows where it has not seen a batch of this shape; parameters, buffers and RNG stay as they are.
        Gradients must be empty, unless the step is to ``accumulate``: what it keeps of them is ``kept_bytes``.
        The peak is that of forward and backward, or of the optimizer's step if it takes more, in bytes of
        tensors; ``reserved_bytes``, on CUDA, what torch's allocator has of the device then, its cache included (more
        than ``limit_bytes`` where nothing fits), and None on the CPU; ``limit_bytes`` is the limit, on CUDA without one
        what the device has; ``parameter_bytes``,
        ``gradient_bytes``, ``optimizer_bytes`` (state), ``buffer_bytes`` and ``activation_bytes`` (the rest)
        add up to it. ``margin_bytes`` is what the peak may be short by, and is kept free: what earlier forecasts were
        short by, and on CUDA the share of a step that follows no line in the rows, such as cuDNN's workspaces;
        ``workspaces_unknown`` that cuDNN's benchmark mode tries algorithms whose workspaces are in no forecast;
        ``whole_bytes`` what the batch would take in one piece, of what ``limit_bytes`` bounds. None where memory
        follows no law that is known, rows differ in what they hold (jagged, sparse, PackedSequence), the batch has
        fewer than three rows, or a CUDA allocator is not torch's own. Raises ``ValueError`` in lockstep: there no rank
        can run rows alone.
        """
        _checked(batch, loss_fn, None)
        self._place_state()
        self._room.keep()
        rows = self._rows_by_length(batch, loss_fn)
        return self._core.plan(
            self._counted(batch), self._local(loss_fn), self._model, bool(accumulate), rows
        )

    def regrouped(self) -> None:
        """The model's wrapped modules have another group now: ``DistributedDataParallel.regroup``. On all its ranks.

        What was agreed with the old group is forgotten; sizes that were found are kept. Raises ``ValueError`` for
        torch's own ``DistributedDataParallel``, which keeps its group.
        """
        if self._wrapped_by_torch:
            raise ValueError(
                "torch's DistributedDataParallel keeps its process group, and cannot go on with another one "
                f"(modules: {len(self._wrapped_by_torch)}); wrap them with brimful.DistributedDataParallel"
            )
        self._core.regrouped()
        if self._host is not None and self._core.world_size > 1:
            self._host.be_alike()

    def _optimizer_states(self) -> list[torch.Tensor]:
        return [
            value
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
            and not self._lies_elsewhere(optimizer, parameter, name)
        ] + self._room.tensors()

    def _lies_elsewhere(self, *of: Any) -> bool:
        return self._host is not None and self._host.lies_elsewhere(*of)

    def _standing_tensors(
        self,
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor] | None]:
        states = self._optimizer_states() if self._optimizers else None
        return self._parameters, self._buffers, states

    def report(self) -> _C.Report:
        """What this sizer has seen on this rank since it was made; ``print`` shows it in a few lines.

        Steps, retries, out-of-memory errors, the rows of a piece that fits (0 until memory runs out), the limit, peak
        over limit (``last_fill``, ``mean_fill``, ``most_fill``; None without a limit), milliseconds in steps and of
        these in attempts that were repeated, and the last 64 steps (``history``). Waits for nothing.
        """
        return self._core.report()

    def _optimizer_bytes(self) -> int:
        """What a step's gradients and the optimizer's step will take beyond what is in use without them."""
        if not self._optimizers:
            return 0
        return self._room.next_step_bytes() + self._gradient_bytes

    def state_dict(self) -> dict[str, float]:
        """What a resumed job needs to start with the sizes found (by ``predict``, too, which then rehearses nothing for
        the batch of the last forecast), as plain numbers.

        ``consumed`` counts the batches that were stepped; the one looked ahead is not among them.
        """
        return {**self._core.state(), "consumed": float(self._consumed)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Raises ``ValueError`` if ``state`` is not what ``state_dict`` gave."""
        self._core.load_state({name: float(value) for name, value in state.items()})
        self._consumed = int(state.get("consumed", 0))
