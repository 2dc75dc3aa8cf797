"""Replicas of a pipeline that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch

from brimful import _C
from brimful._job import Job, Result, layout_of, program_of
from brimful.fleet import Members
from brimful.pipeline import Pipeline
from brimful.reducer import DistributedDataParallel
from brimful.sampler import GlobalSampler
from brimful.sizer import NO_DATA

__all__ = ["PipelineFleet"]


class PipelineFleet(Job):
    """A ``Fleet`` whose replicas are pipelines: a rank that dies takes its replica out, and the others go on.

    ::

        members = brimful.Members(
            store, world_size=4, replica="r0", pipeline_rank=0, pipeline_size=2
        )
        fleet = brimful.PipelineFleet(
            members, [stage], optimizer, data, batch_size=96, loss_fn=loss_fn
        )

        def step(batch):
            outcome = fleet.pipe.step(*batch)
            optimizer.step()
            optimizer.zero_grad()
            return outcome

        for outcome in fleet.steps(step, epochs=2):
            print(outcome.loss)

    Each process has the ``stages`` of its rank; the ranks of a pipeline give ``Members`` the same ``replica``. With
    ``pipeline_size=1`` a replica is a process that has all stages. The constructor waits for the other processes. It
    reduces the gradients of all of them together, with the arguments ``wrap`` of ``DistributedDataParallel``, and makes
    ``pipe`` with the arguments ``options`` of ``Pipeline``; move the stages to their devices before.

    ``batch_size`` is that of all replicas together, and all ranks of a replica get the same batch. When a rank dies, a
    step that no replica finished is undone and repeated by the replicas that are whole, with its rows cut anew; a rank
    that missed a step which others finished gets the state of the same rank of another replica. The other ranks of the
    broken replica raise ``LeftOut``, which names it and the rank that died; started again, all together, they join.

    All else is as in ``Fleet``. Replicas have equal shares of a batch, whatever their speed.
    """

    def __init__(
        self,
        members: Members,
        stages: Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        data: Sized,
        *,
        batch_size: int,
        loss_fn: Callable[[Any, Any], Any],
        state: Sequence[Any] = (),
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        version: str = "",
        wrap: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._members = members
        self._loss_fn = loss_fn
        size = members._core.pipeline_size
        whole = _whole_of(stages, loss_fn, size)
        # One reducer for all: several of one group take turns, which threads of stages do not wait for.
        wrapped = DistributedDataParallel(whole, process_group=_C._group_of_one(), **(wrap or {}))
        sampler = GlobalSampler(
            data,
            batch_size=batch_size,
            rank=0,
            world_size=1,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            collate_fn=collate_fn,
        )
        super().__init__([wrapped], optimizer, state, sampler)
        seed_text = seed if shuffle else None
        self._program = program_of(
            version, f"pipelines of {size} ranks", len(data), batch_size, seed_text
        )
        self._part = f"stages {layout_of([whole])}"
        self._steps_made = 0
        self._entered: _C.Membership | None = members.enter(self._program, self._part)
        self.pipe = _Replica(
            wrapped.reducer,
            stages,
            group=self._entered.pipeline_group,
            loss_fn=loss_fn,
            **(options or {}),
        )
        self.pipe._observers = (*self.pipe._observers, self.note)

    @property
    def replica(self) -> int:
        """The number of this process's replica in the group; ``world_size`` is that of replicas."""
        return self.rank

    def steps(self, step: Callable[[Any], Result], *, epochs: int) -> Iterator[Result]:
        """Yield what ``step(batch)`` returned for each step that stands; see ``Fleet.steps``.

        ``step`` calls ``self.pipe.step`` once, and then the optimizer, a scheduler and the like. Where an epoch's last
        step has fewer rows than there are replicas, the last of them get one row that counts for nothing.

        Raises ``LeftOut`` where a rank of this replica died, and else what ``Fleet.steps`` raises.
        """
        return super().steps(step, epochs=epochs)

    def note(self, outcome: Any) -> None:
        super().note(outcome)
        self._steps_made += 1

    def _enter(self) -> _C.Membership:
        entered, self._entered = self._entered, None
        return entered or self._members.enter(self._program, self._part)

    def _leave(self) -> None:
        self._members.leave()

    def _meet_at_end(self) -> bool:
        return self._members._core.meet("the end")

    def _is_lost(self, error: Exception) -> bool:
        return self.pipe._core.is_broken

    def _run(self, step: Callable[[Any], Result], batch: Any) -> Result:
        self._steps_made = 0
        if batch is NO_DATA:
            batch = self.sampler.load([0])
            self.pipe._loss_fn = self._loss_of_nothing
        try:
            result = step(batch)
        finally:
            self.pipe._loss_fn = self._loss_fn
        if self._steps_made != 1:
            raise RuntimeError(
                f"the step function must call pipe.step once (calls: {self._steps_made})"
            )
        return result

    def _loss_of_nothing(self, output: Any, target: Any) -> tuple[torch.Tensor, float]:
        loss = self._loss_fn(output, target)
        return (loss[0] if isinstance(loss, tuple) else loss), 0.0

    def _heal(self, entered: _C.Membership) -> list[int] | None:
        """Of all ranks of all replicas, or of none: a rank that went on would wait for the others of its pipeline."""
        try:
            healed = super()._heal(entered)
        except BaseException:
            self._members._core.meet("healed", ready=False)
            raise
        return healed if self._members._core.meet("healed") else None

    def _regrouped(self) -> None:
        self.pipe._core.regrouped(self._progress)


class _Replica(Pipeline):
    def __init__(
        self, reducer: _C.Reducer, stages: Sequence[torch.nn.Module], **options: Any
    ) -> None:
        self._reducers = (reducer,)
        super().__init__(stages, **options)


def _whole_of(stages: Sequence[Any], loss_fn: Any, size: int) -> torch.nn.ModuleList:
    """All that this process trains."""
    modules = [*stages]
    if isinstance(loss_fn, torch.nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        if size > 1:
            raise ValueError(
                "a loss function with parameters has no place in a pipeline of several processes "
                f"(pipeline_size: {size}); put them into the last stage"
            )
        modules.append(loss_fn)
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"a PipelineFleet's stage must be a torch.nn.Module (type: {type(module)}); put the function into a "
                "module"
            )
    return torch.nn.ModuleList(modules)
