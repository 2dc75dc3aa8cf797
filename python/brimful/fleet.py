"""Ranks that come and go: a job goes on with whoever lives, from the step that all of them have."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from brimful import _C
from brimful._build_info import version
from brimful.reducer import DistributedDataParallel
from brimful.sampler import GlobalSampler
from brimful.sizer import NO_DATA, BatchSizer

__all__ = ["Fleet", "Members"]

Result = TypeVar("Result")
_FRESH = -1  #: the progress of a process that has not been in a group yet


class Members:
    """A process among those that train together, which find each other through a store that outlives each of them.

    ``store`` is one of torch's, such as a ``TCPStore`` that a process beside the ranks serves, or that of ``torchrun``.
    ``name`` is for messages. ``world_size`` is that of the first group; later ones have whoever is there.

    A thread of each process says in the store that it lives, each ``heartbeat_ms``: one that is busy is waited for, and
    one that has been silent for ``dead_after_ms`` is not. A new group waits ``patience_ms`` for a member that lives and
    does not come, and the first group for its ranks; its ranks connect within ``connect_ms``, and its collectives have
    ``timeout_ms``. With a CUDA ``device`` its tensors go over NCCL.
    """

    def __init__(
        self,
        store: Any,
        name: str | None = None,
        *,
        world_size: int,
        heartbeat_ms: int = 50,
        dead_after_ms: int = 400,
        patience_ms: int = 300_000,
        connect_ms: int = 5_000,
        timeout_ms: int = 1_800_000,
        device: torch.device | None = None,
    ) -> None:
        self._core = _C._Members(
            store,
            name or f"process {os.getpid()} of {socket.gethostname()}",
            world_size=world_size,
            heartbeat_ms=heartbeat_ms,
            dead_after_ms=dead_after_ms,
            patience_ms=patience_ms,
            connect_ms=connect_ms,
            timeout_ms=timeout_ms,
            device=device,
        )

    def enter(self, model: str) -> _C.Membership:
        """The next group: ``group``, ``epoch`` (its number, from 1), ``rank``, ``world_size`` and ``names``.

        For the first time, or as one that joins; later when a rank has failed, or ``Outcome.regroup`` says that all
        form a new group. ``model`` names model and program: a process with another one is refused before it is in.

        Raises ``PlanMismatch`` for another ``model``, ``LeftOut`` where the others went on without this process,
        ``StoreLost`` without a store, and ``RuntimeError`` where nobody lets it in within ``patience_ms``.
        """
        return self._core.enter(model)

    def leave(self) -> None:
        """The others need not wait for this process from now on."""
        self._core.leave()


class Fleet:
    """Trains with ranks that may die, be cut off or join, without losing a row or repeating one.

    ::

        members = brimful.Members(store, world_size=3)
        fleet = brimful.Fleet(members, net, optimizer, data, batch_size=96)

        def step(batch):
            outcome = fleet.sizer.step(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            return outcome

        for outcome in fleet.steps(step, epochs=2):
            print(outcome.loss)

    All processes run this program, those that are started later too. ``data`` is a data set, ``batch_size`` that of all
    ranks together: a step has the same rows whoever is there. When a rank dies, the others form a new group, a step
    that nobody finished is undone and repeated with its rows cut anew, and a rank that missed one which others finished
    gets their parameters, buffers, optimizer and ``state`` (things with ``state_dict`` and ``load_state_dict``, such as
    a scheduler). A process that joins gets the same. Random generators are each rank's own.

    ``version`` is the program's: a process with another one, or with another model, data or batch size, is refused.
    ``wrap`` has arguments for ``DistributedDataParallel``, ``sizes`` for ``BatchSizer``; ``model``, ``sizer`` and
    ``sampler`` are there to be used. Of communication hooks and torch's own ``DistributedDataParallel`` there are none.
    """

    def __init__(
        self,
        members: Members,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        data: Sized,
        *,
        batch_size: int,
        state: Sequence[Any] = (),
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        min_rows: int = 1,
        version: str = "",
        wrap: dict[str, Any] | None = None,
        sizes: dict[str, Any] | None = None,
    ) -> None:
        self._members = members
        # Wrapped alone at first: a process that joins and those that are there enter the next group alike.
        self.model = DistributedDataParallel(
            model, process_group=_C._group_of_one(), **(wrap or {})
        )
        self.sizer = BatchSizer(self.model, optimizer, **(sizes or {}))
        self.sampler = GlobalSampler(
            data,
            batch_size=batch_size,
            rank=0,
            world_size=1,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            min_rows=min_rows,
            collate_fn=collate_fn,
        )
        self._optimizers = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        )
        self._stateful = [*self._optimizers, *state]
        self._program = _program_of(model, version, len(data), batch_size, seed, shuffle)
        self._progress = _FRESH
        self._whole = True
        self._stopped = False
        self._outcome: _C.Outcome | None = None
        self._group: _C.Membership | None = None
        #: Of the last new group: ``epoch``, ``world_size``, ``names``, ``healed`` ranks; in seconds ``wait_s`` for the
        #: others to come or to be known as dead, ``form_s`` to connect, ``heal_s``.
        self.last_regroup: dict[str, Any] = {}

    @property
    def progress(self) -> int:
        """Steps that the parameters have taken."""
        return max(self._progress, 0)

    @property
    def epoch(self) -> int:
        """The group's number; 0 before the first one."""
        return 0 if self._group is None else int(self.last_regroup["epoch"])

    @property
    def rank(self) -> int:
        return self.model.reducer.rank

    @property
    def world_size(self) -> int:
        return self.model.reducer.world_size

    def note(self, outcome: _C.Outcome | None) -> None:
        self._outcome = outcome

    def steps(self, step: Callable[[Any], Result], *, epochs: int) -> Iterator[Result]:
        """Yield what ``step(batch)`` returned for each step that stands, until ``epochs`` epochs of the data are done.

        ``step`` calls ``self.sizer.step`` once, and then the optimizer, a scheduler and the like; where a rank dies in
        the middle it is called again, with other rows. A step that this rank missed, and has by another's state, is
        not yielded. All ranks end together, also where one was asked to stop (``brimful.request_stop``).

        Raises what ``step`` raises: an error of one rank, such as a batch that does not fit, ends the job on all, as
        without a fleet. Raises ``LeftOut`` where the others went on without this process, ``StoreLost`` where a rank
        died and there is no store to form a new group, ``PlanMismatch`` for another model or program, and
        ``HalfStepError`` where all ranks broke off in the middle of ``step`` after ``sizer.step``.
        """
        while True:
            try:
                if self._group is None:
                    self._regroup()
                if self.sampler.epoch >= epochs or self._stopped:
                    self.model.reducer.gather(b"the end.")
                    break
                result = self._step(step)
            except _C.RankFailed:
                if not self.model.reducer.is_broken:
                    raise  # a rank failed in its own step, and lives
                self._group = None
                continue
            yield result
        self._members.leave()

    def _step(self, step: Callable[[Any], Result]) -> Result:
        result = self._call(step)
        self._count()
        return result

    def _call(self, step: Callable[[Any], Result]) -> Result:
        core = self.sampler._core
        core.reset()
        rows = core.next_step()
        if rows is None:
            raise ValueError("the data set has no whole batch; pass a smaller batch_size")
        batch = self.sampler.load(rows) if rows else NO_DATA
        self._outcome, calls = None, self.sizer._core.calls
        self.sizer._sampler = (
            self  # notes the outcome here: the sampler has it when the step is whole
        )
        try:
            result = step(batch)
        except BaseException:
            self._whole = self._outcome is None
            raise
        finally:
            self.sizer._sampler = None
        if self._outcome is None or self.sizer._core.calls != calls + 1:
            raise RuntimeError(
                f"a step is one call of sizer.step (calls: {self.sizer._core.calls - calls}); call it once"
            )
        return result

    def _count(self) -> None:
        """The step stands."""
        assert self._outcome is not None
        self.sampler.note(self._outcome)
        self._progress += 1
        self._stopped = self._outcome.stop
        if self._outcome.regroup:
            self._group = None

    def _regroup(self) -> None:
        while True:
            begun = time.perf_counter()
            entered = self._members.enter(self._program)
            formed = time.perf_counter()
            try:
                healed = self._heal(entered)
            except _C.RankFailed:
                continue
            self.last_regroup = {
                "epoch": entered.epoch,
                "world_size": entered.world_size,
                "names": entered.names,
                "healed": healed,
                "wait_s": entered.waited_ms / 1000,
                "form_s": formed - begun - entered.waited_ms / 1000,
                "heal_s": time.perf_counter() - formed,
            }
            self._group = entered
            return

    def _heal(self, entered: _C.Membership) -> list[int]:
        agreed = self.model.regroup(entered.group, progress=self._progress, whole=self._whole)
        if agreed.source < 0:
            raise _C.HalfStepError(
                "every rank was in the middle of its step when one died: after sizer.step and before the end of "
                f"`step` (steps: {max(agreed.progress)}); make no collective there, and load a checkpoint"
            )
        behind = [
            rank
            for rank in range(entered.world_size)
            if rank != agreed.source and _is_behind(agreed, rank)
        ]
        if behind:
            self._transfer(agreed.source, entered.rank, lacks=entered.rank in behind)
        self._progress = max(agreed.progress[agreed.source], 0)
        self._whole = True
        self.sampler.regroup(entered.rank, entered.world_size)
        self.sizer.regrouped()
        self._compare()
        return behind

    def _tensors(self) -> list[torch.Tensor]:
        module = self.model.module
        return [*module.parameters(), *module.buffers()]

    def _transfer(self, source: int, rank: int, *, lacks: bool) -> None:
        """All of rank `source` to the ranks that lack it; who has it makes the same calls."""
        reducer, fresh = self.model.reducer, self._progress == _FRESH
        state: Any = [thing.state_dict() for thing in self._stateful]
        state += [self.sampler.state_dict(), self.sizer.state_dict(), self._stopped]
        leaves, spec = tree_flatten(state)
        shown = [_Shape(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        text = pickle.dumps((shown, spec)) if rank == source else b""
        length = struct.unpack("q", reducer.gather(struct.pack("q", len(text)))[source])[0]
        theirs, their_spec = pickle.loads(_shared(reducer, text.ljust(length, b"\0"), source))
        own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if lacks:
            self._progress, self._whole = _FRESH, False  # until all of it is here
        reducer.broadcast(self._tensors(), source)
        for i, place in enumerate([i for i, leaf in enumerate(theirs) if isinstance(leaf, _Shape)]):
            tensor = own[i] if rank == source else theirs[place].empty(self.model.device)
            if tensor.numel() > 0:
                reducer.broadcast([tensor.detach().contiguous().view(-1).view(torch.uint8)], source)
            theirs[place] = tensor if lacks else None
        if not lacks:
            return
        *states, of_sampler, of_sizer, self._stopped = tree_unflatten(theirs, their_spec)
        for thing, of_thing in zip(self._stateful, states, strict=True):
            thing.load_state_dict(of_thing)
        self.sampler.load_state_dict(of_sampler)
        if fresh:  # else it has found its own sizes
            self.sizer.load_state_dict(of_sizer)
        self.model.zero_grad()

    def _compare(self) -> None:
        agree = self.model.forward_sync_buffers
        values = self._tensors() if agree else list(self.model.module.parameters())
        own = struct.pack("Q", _C._fingerprint_of(values))
        all_ranks = self.model.reducer.gather(own)
        differ = [rank for rank, theirs in enumerate(all_ranks) if theirs != all_ranks[0]]
        if differ:
            raise _C.PlanMismatch(
                f"the ranks' parameters or buffers differ after a new group was formed (ranks that differ from rank 0: "
                f"{differ}, steps: {self.progress}); load a checkpoint of the same step on every rank"
            )

    def state_dict(self) -> dict[str, Any]:
        """Where the job is; model, optimizers and ``state`` are the program's to save."""
        return {
            "progress": self.progress,
            "sampler": self.sampler.state_dict(),
            "sizer": self.sizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before ``steps``, on all ranks alike."""
        self.sampler.load_state_dict(state["sampler"])
        self.sizer.load_state_dict(state["sizer"])
        self._progress = int(state["progress"])


class _Shape:
    """In place of a tensor, which travels by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.on_host = tensor.device.type == "cpu"

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_host else device)


def _is_behind(agreed: _C.Regrouped, rank: int) -> bool:
    progress = agreed.progress[rank]
    return progress < agreed.progress[agreed.source] or progress == _FRESH or not agreed.whole[rank]


def _shared(reducer: _C.Reducer, text: bytes, source: int) -> bytes:
    buffer = bytearray(text)
    reducer.broadcast([torch.frombuffer(buffer, dtype=torch.uint8)], source)
    return bytes(buffer)


def _program_of(
    model: torch.nn.Module, program: str, rows: int, batch_size: int, seed: int, shuffle: bool
) -> str:
    layout = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.named_parameters()]
    layout += [(name, tuple(t.shape), str(t.dtype)) for name, t in model.named_buffers()]
    of_model = hashlib.sha256(repr(layout).encode()).hexdigest()[:12]
    return (
        f"version {program or 'not given'}, brimful {version}, torch {torch.__version__}, model {of_model}, "
        f"{rows} rows in batches of {batch_size}, seed {seed if shuffle else 'none'}"
    )
