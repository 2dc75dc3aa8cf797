"""Under torchft, which decides who trains: the batch stays whole, and no row is lost when a replica dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from brimful.integrations._extra import require

require("torchft")

import torch
from torchft.manager import WorldSizeMode
from torchft.process_group import ProcessGroupBaby, ProcessGroupWrapper

import brimful
from brimful import _C

__all__ = ["Fleet"]


class Fleet(brimful.Fleet):
    """A ``brimful.Fleet`` whose members a torchft ``Manager`` chooses. A replica group is one process.

    ::

        pg = ProcessGroupGloo(timeout=timedelta(seconds=10))
        manager = Manager(pg=pg, load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False)
        fleet = Fleet(manager, pg, net, optimizer, data, batch_size=96)
        for outcome in fleet.steps(lambda batch: fleet.sizer.step(batch, loss_fn), epochs=2):
            scheduler.step()

    Each step asks the manager who is there, and whether the optimizer may step: it does so here, not in ``step``. A
    replica that is behind gets the state of another one through the manager. ``data``, ``batch_size`` and the options
    are those of ``brimful.Fleet``.

    Raises ``ValueError`` for a process group that lives in a child process, a manager with asynchronous quorums or with
    spares, and replica groups of several ranks.
    """

    def __init__(
        self,
        manager: Any,
        pg: ProcessGroupWrapper,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        data: Sized,
        **options: Any,
    ) -> None:
        _require(manager, pg)
        super().__init__(None, model, optimizer, data, **options)  # type: ignore[arg-type]
        self._manager, self._pg = manager, pg
        manager.register_state_dict_fn("brimful", self._load, self._save)

    def steps(self, step: Callable[[Any], Any], *, epochs: int) -> Iterator[Any]:
        """Yield what ``step(batch)`` returned for each step that was committed.

        ``step`` calls ``self.sizer.step`` once; it may clip gradients after that. A step that this replica missed, and
        has by another's state, is not yielded. Raises as ``brimful.Fleet.steps`` does, and what the manager raises.
        """
        while True:
            self._manager.start_quorum()
            try:
                if not self._may_step():
                    self._manager.should_commit()  # it counts, and asks for another quorum
                    continue
                self._follow()
                if self.sampler.epoch >= epochs or self._stopped:
                    self.model.reducer.gather(b"the end.")
                    return
                result = self._call(step)
            except _C.RankFailed as error:
                if self._is_in and not self.model.reducer.is_broken:
                    raise  # a replica failed in its own step, and lives
                self._manager.report_error(error)
                self._manager.should_commit()
                continue
            committed = self._manager.should_commit()
            if committed:
                for optimizer in self._optimizers:
                    optimizer.step()
                self._count()
            self.model.zero_grad()
            if committed:
                yield result

    @property
    def _is_in(self) -> bool:
        """All of the quorum went on with its group."""
        return self._group is not None and self._group is self._pg._pg

    def _may_step(self) -> bool:
        manager = self._manager
        return manager.errored() is None and manager.num_participants() >= manager._min_replica_size

    def _follow(self) -> None:
        """The wrapper has another group inside after each new quorum."""
        group = self._pg.parent
        if group is self._group:
            return
        self.model.regroup(group, progress=self._progress)
        self._group = group
        self.last_regroup = {"epoch": self._pg._quorum_id, "world_size": group.size()}
        self._progress = max(self._progress, 0)
        self.sampler.regroup(group.rank(), group.size())
        self.sizer.regrouped()
        self._compare()

    def _save(self) -> dict[str, Any]:
        return {
            "program": self._program,
            "tensors": [tensor.detach().cpu() for tensor in self._tensors()],
            "stateful": [thing.state_dict() for thing in self._stateful],
            "fleet": self.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        if state["program"] != self._program:
            raise _C.PlanMismatch(
                f"another replica trains another model or program (there: {state['program']}; here: {self._program}); "
                "start the same program in every replica group"
            )
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), state["tensors"], strict=True):
                tensor.copy_(value)
        for thing, of_thing in zip(self._stateful, state["stateful"], strict=True):
            thing.load_state_dict(of_thing)
        self.load_state_dict(state["fleet"])


def _require(manager: Any, pg: object) -> None:
    if isinstance(pg, ProcessGroupBaby) or not isinstance(pg, ProcessGroupWrapper):
        raise ValueError(
            f"a reducer launches collectives in its own process (process group: {type(pg).__name__}); "
            "use torchft's ProcessGroupGloo or ProcessGroupNCCL"
        )
    if manager._use_async_quorum:
        raise ValueError(
            "rows are cut among replicas before a step begins (use_async_quorum: True); "
            "pass use_async_quorum=False to the manager"
        )
    if manager._replica_world_size_mode != WorldSizeMode.DYNAMIC:
        raise ValueError(
            f"a spare replica would have no rows (world_size_mode: {manager._replica_world_size_mode.name}); "
            "pass world_size_mode=WorldSizeMode.DYNAMIC to the manager"
        )
    if manager._group_world_size != 1:
        raise ValueError(
            f"a replica group is one process (its ranks: {manager._group_world_size}); "
            "start one torchrun for each process"
        )
