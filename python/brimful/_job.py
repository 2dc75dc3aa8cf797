"""How a job goes on whose ranks come and go: what fleets of models and of pipelines have in common."""

from __future__ import annotations

import hashlib
import pickle
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from brimful import _C
from brimful._build_info import version
from brimful.reducer import DistributedDataParallel
from brimful.sampler import GlobalSampler
from brimful.sizer import NO_DATA

Result = TypeVar("Result")
_FRESH = -1  #: the progress of a process that has not been in a group yet


class Job:
    """``modules`` are what this rank trains; those that are wrapped are in groups of one at first."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        state: Sequence[Any],
        sampler: GlobalSampler,
    ) -> None:
        self.sampler = sampler
        self._modules = list(modules)
        self._wrapped = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._optimizers = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        )
        self._stateful = [*self._optimizers, *state]
        self._progress = _FRESH
        self._whole = True
        self._stopped = False
        self._outcome: Any = None
        self._group: _C.Membership | None = None
        #: Of the last new group: ``epoch``, ``world_size``, ``names``, ``healed`` ranks; in seconds ``wait_s`` for the
        #: others to come or to be known as dead, ``form_s`` to connect, ``heal_s``.
        self.last_regroup: dict[str, Any] = {}

    # What a fleet has of its own.

    def _enter(self) -> _C.Membership:
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError

    def _meet_at_end(self) -> bool:
        """False: a rank has died, and another may have missed its last step."""
        raise NotImplementedError

    def _is_lost(self, error: Exception) -> bool:
        """The group broke: no rank has only failed its own step."""
        raise NotImplementedError

    def _run(self, step: Callable[[Any], Result], batch: Any) -> Result:
        """Call ``step``, which is to ``note`` the outcome of one step."""
        raise NotImplementedError

    def _times(self) -> _C.Outcome | None:
        """What shares of rows follow from."""
        return None

    def _sizes(self) -> Any:
        """Sizes that this rank has found, for one that has found none."""
        return None

    def _take_sizes(self, sizes: Any) -> None:
        pass

    def _regrouped(self) -> None:
        raise NotImplementedError

    def _formed(self, entered: _C.Membership) -> bool:
        """What else the new group is to have, on all ranks alike. False: another one is to be formed."""
        return True

    # What is alike.

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
        return self._reducer.rank

    @property
    def world_size(self) -> int:
        return self._reducer.world_size

    @property
    def _reducer(self) -> _C.Reducer:
        return self._wrapped[0].reducer

    def note(self, outcome: Any) -> None:
        self._outcome = outcome

    def steps(self, step: Callable[[Any], Result], *, epochs: int) -> Iterator[Result]:
        while True:
            if self._group is None:
                self._regroup()
            try:
                if self.sampler.epoch >= epochs or self._stopped:
                    if self._meet_at_end():
                        break
                    self._group = None
                    continue
                result = self._step(step)
            except Exception as error:
                if not self._is_lost(error):
                    raise
                self._group = None
                continue
            yield result
        self._leave()

    def _step(self, step: Callable[[Any], Result]) -> Result:
        result = self._call(step)
        self._count()
        return result

    def _call(self, step: Callable[[Any], Result]) -> Result:
        core = self.sampler._core
        core.reset()
        rows = core.next_step()
        if rows is None:
            size, batch_size = self.sampler._size, self.sampler._batch_size
            raise ValueError(
                f"the data set has no whole batch (rows: {size}, batch_size: {batch_size}); pass a smaller "
                "batch_size, or more rows"
            )
        batch = self.sampler.load(rows) if rows else NO_DATA
        self._outcome = None
        try:
            return self._run(step, batch)
        except BaseException:
            self._whole = self._outcome is None
            raise

    def _count(self) -> None:
        """The step stands."""
        self.sampler.note(self._times())
        self._progress += 1
        self._stopped = self._outcome.stop
        if self._outcome.regroup:
            self._group = None

    def _regroup(self) -> None:
        while True:
            begun = time.perf_counter()
            entered = self._enter()
            formed = time.perf_counter()
            try:
                healed = self._heal(entered)
                if healed is None or not self._formed(entered):
                    continue
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

    def _heal(self, entered: _C.Membership) -> list[int] | None:
        """The ranks that were behind; None: a rank has died, and another group is to be formed."""
        for module in self._wrapped:
            agreed = module.regroup(entered.group, progress=self._progress, whole=self._whole)
        if agreed.source < 0:
            raise _C.HalfStepError(
                "a rank died while every rank was between its gradients and the end of `step` (steps: "
                f"{max(agreed.progress)}), so that parameters may be half updated; make no collective of your own "
                "there, and load a checkpoint"
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
        self._regrouped()
        self._compare()
        return behind

    def _tensors(self) -> list[torch.Tensor]:
        tensors = (t for m in self._modules for t in [*m.parameters(), *m.buffers()])
        return list(dict.fromkeys(tensors))

    def _transfer(self, source: int, rank: int, *, lacks: bool) -> None:
        """All of rank `source` to the ranks that lack it; who has it makes the same calls."""
        reducer, fresh = self._reducer, self._progress == _FRESH
        state: Any = [thing.state_dict() for thing in self._stateful]
        state += [self.sampler.state_dict(), self._sizes(), self._stopped]
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
            tensor = own[i] if rank == source else theirs[place].empty(self._wrapped[0].device)
            if tensor.numel() > 0:
                reducer.broadcast([tensor.detach().contiguous().view(-1).view(torch.uint8)], source)
            theirs[place] = tensor if lacks else None
        if not lacks:
            return
        *states, of_sampler, sizes, self._stopped = tree_unflatten(theirs, their_spec)
        for thing, of_thing in zip(self._stateful, states, strict=True):
            thing.load_state_dict(of_thing)
        self.sampler.load_state_dict(of_sampler)
        if fresh:  # else it has found its own sizes
            self._take_sizes(sizes)
        for module in self._modules:
            module.zero_grad()

    def _compare(self) -> None:
        agree = all(module.forward_sync_buffers for module in self._wrapped)
        values = self._tensors()
        if not agree:
            values = [tensor for tensor in values if isinstance(tensor, torch.nn.Parameter)]
        own = struct.pack("Q", _C._fingerprint_of(values))
        all_ranks = self._reducer.gather(own)
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
            "sizer": self._sizes(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before ``steps``, on all ranks alike."""
        self.sampler.load_state_dict(state["sampler"])
        self._take_sizes(state["sizer"])
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


def layout_of(modules: Iterable[torch.nn.Module]) -> str:
    """Of names, shapes and dtypes."""
    named = [n for m in modules for n in [*m.named_parameters(), *m.named_buffers()]]
    layout = [(name, tuple(t.shape), str(t.dtype)) for name, t in named]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:12]


def program_of(program: str, model: str, rows: int, batch_size: int, seed: int | None) -> str:
    return (
        f"version {program or 'not given'}, brimful {version}, torch {torch.__version__}, {model}, "
        f"{rows} rows in batches of {batch_size}, seed {'none' if seed is None else seed}"
    )
