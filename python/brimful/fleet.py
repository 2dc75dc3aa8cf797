"""Ranks that come and go: a job goes on with whoever lives, from the step that all of them have."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from brimful import _C
from brimful._job import Job, Result, layout_of, program_of
from brimful._log import text_of
from brimful.reducer import DistributedDataParallel
from brimful.sampler import GlobalSampler
from brimful.sizer import BatchSizer

__all__ = ["Fleet", "Members"]

_HANDLE_BYTES = 512
_FIRST_UUID = 1 << 40  #: others than a program has used itself
_MOST_CHANGES = 3


class Members:
    """A process among those that train together, which find each other through a store that outlives each of them.

    ``store`` is one of torch's, such as a ``TCPStore`` that a process beside the ranks serves, or that of ``torchrun``.
    ``name`` is for messages. ``world_size`` is that of the first group; later ones have whoever is there.

    A thread of each process says in the store that it lives, each ``heartbeat_ms``: one that is busy is waited for, and
    one that has been silent for ``dead_after_ms`` is not. A new group waits ``patience_ms`` for a member that lives and
    does not come, and the first group for its ranks; its ranks connect within ``connect_ms``, and its collectives have
    ``timeout_ms``. With a CUDA ``device`` its tensors go over NCCL.

    The ranks of a pipeline over ``pipeline_size`` processes have the same ``replica``, a name, and ``pipeline_rank``
    from 0 on. They are in a group together or not at all (``PipelineFleet``); ``world_size`` counts processes.
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
        replica: str = "",
        pipeline_rank: int = 0,
        pipeline_size: int = 1,
    ) -> None:
        self.connect_timeout = datetime.timedelta(milliseconds=connect_ms)
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
            replica=replica,
            pipeline_rank=pipeline_rank,
            pipeline_size=pipeline_size,
        )

    def enter(self, model: str, part: str = "") -> _C.Membership:
        """The next group: ``group``, ``epoch`` (its number, from 1), ``rank``, ``world_size`` and ``names``.

        For the first time, or as one that joins; later when a rank has failed, or ``Outcome.regroup`` says that all
        form a new group. ``model`` names model and program: a process with another one is refused before it is in.

        Of ranks of pipelines, the group has those with the same rank, and ``pipeline_group`` is that of the pipeline. A
        ``part`` names this rank's part of the model, which is the same in all replicas.

        Raises ``PlanMismatch`` for another ``model``, ``LeftOut`` where the others went on without this process,
        ``StoreLost`` without a store, and ``RuntimeError`` where no member lets it in within ``patience_ms``.
        """
        return self._core.enter(model, part)

    def leave(self) -> None:
        """The others need not wait for this process from now on."""
        self._core.leave()


class Fleet(Job):
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
    that no rank finished is undone and repeated with its rows cut anew, and a rank that missed one which others
    finished gets their parameters, buffers, optimizer and ``state`` (things with ``state_dict`` and
    ``load_state_dict``, such as a scheduler). A process that joins gets the same. Random generators are each rank's
    own.

    Where the program has a process group of its own that can change in place (``init_process_group(...,
    enable_reconfigure=True)``, torch 2.15 and later), the fleet reconfigures it with each new group: it has the fleet's
    ranks then, in their order, and so have ``get_rank``, ``get_world_size``, a device mesh over all of it, and what
    evaluation sends. Call its collectives between steps, and not before the first one.

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
        sampler = GlobalSampler(
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
        super().__init__([self.model], optimizer, state, sampler)
        self._failed_to_change = 0
        self._program = program_of(
            version,
            f"model {layout_of([model])}",
            len(data),
            batch_size,
            seed if shuffle else None,
        )

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
        return super().steps(step, epochs=epochs)

    def _enter(self) -> _C.Membership:
        return self._members.enter(self._program)

    def _formed(self, entered: _C.Membership) -> bool:
        group = _changing_group()
        own = b"" if group is None else group.get_reconfigure_handle().encode()
        theirs = self._reducer.gather(own.ljust(_HANDLE_BYTES, b"\0"))
        handles = [handle.rstrip(b"\0").decode() for handle in theirs]
        if not all(handles):
            return True  # of some ranks, or of none
        error = ""
        try:
            distributed_c10d._reconfigure(
                _FIRST_UUID + entered.epoch, handles, group, self._members.connect_timeout
            ).wait()
        except Exception as caught:
            error = text_of(caught)
        all_have = all(answer[0] for answer in self._reducer.gather(bytes([not error] * 8)))
        self._failed_to_change = 0 if all_have else self._failed_to_change + 1
        if self._failed_to_change > _MOST_CHANGES:
            raise RuntimeError(
                "the program's own process group could not be reconfigured (tried: "
                f"{self._failed_to_change} times, on this rank: {error or 'done'}); look at the other ranks' output, "
                "or leave enable_reconfigure out"
            )
        return all_have

    def _leave(self) -> None:
        self._members.leave()

    def _meet_at_end(self) -> bool:
        self._reducer.gather(b"the end.")
        return True

    def _is_lost(self, error: Exception) -> bool:
        return isinstance(error, _C.RankFailed) and self._reducer.is_broken

    def _run(self, step: Callable[[Any], Result], batch: Any) -> Result:
        calls = self.sizer._core.calls
        # It notes the outcome here: the sampler has it when the step is whole.
        self.sizer._sampler = self
        try:
            result = step(batch)
        finally:
            self.sizer._sampler = None
        made = self.sizer._core.calls - calls
        if self._outcome is None or made != 1:
            raise RuntimeError(f"the step function must call sizer.step once (calls: {made})")
        return result

    def _times(self) -> _C.Outcome | None:
        return self._outcome  # type: ignore[no-any-return]

    def _sizes(self) -> Any:
        return self.sizer.state_dict()

    def _take_sizes(self, sizes: Any) -> None:
        self.sizer.load_state_dict(sizes)

    def _regrouped(self) -> None:
        self.sizer.regrouped()


def _changing_group() -> Any:
    """The program's own, if it was made to change in place."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: Any = dist.group.WORLD
    if not getattr(group, "supports_reconfigure", False):
        return None
    options = [group._get_backend(device).options for device in group._device_types]
    return group if all(getattr(o, "enable_reconfigure", False) for o in options) else None
