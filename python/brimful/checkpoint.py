"""Checkpoints that rank 0 writes and every rank reads; the meeting of the ranks is done in C++.

For ``torch.distributed.checkpoint`` there are states that it can save and load: ``PerRank`` (which ``save_on_rank0``
takes too) and ``BucketPlan``.
"""

from __future__ import annotations

import json
import os
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from brimful import _C
from brimful._process_end import text_of
from brimful.reducer._wrapping import Contents, member_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from brimful.reducer import DistributedDataParallel

__all__ = ["BucketPlan", "PerRank", "load", "save_on_rank0"]


def save_on_rank0(
    state: Any, path: str | os.PathLike[str], group: dist.ProcessGroup | None = None
) -> None:
    """``torch.save(state, path)`` on rank 0 only; returns on every rank once the file is whole.

    A ``PerRank`` in ``state``, or in a dict in it, stands for what every rank has of its own: it is gathered from all
    ranks, with one collective, and ``PerRank.load_state_dict`` takes the entry that ``load`` gives in its place.

    It is written beside ``path`` (under a name of its own that ends in ".partial"), brought to the disk and renamed: at
    any time ``path`` holds the old file or the new one. Only a regular file is replaced: a symbolic link, a FIFO or a
    device stays, and the error says so (links to folders are followed). All ranks call it, in the same order as other
    saves and loads of the group; they meet through the group's store, without a collective, and wait for rank 0 at most
    the group's timeout. ``group`` is the default group; without one this process is alone. One thread of a rank at a
    time.

    Raises on rank 0 what went wrong there (``OSError`` where the file system refused) and on the others ``RankFailed``
    with rank 0's message; then the old file is as it was. ``RankFailed`` names who is missing where ranks did not come
    in time; then the file is whole, old or new.
    """

    whole = _with_all_ranks(state, _group(group))

    def write(file: _C._FileSink) -> None:
        torch.save(whole, cast(IO[bytes], file))  # which uses write and flush

    _C._save_on_rank0(_group(group), os.fsencode(path), write)


def load(
    path: str | os.PathLike[str],
    map_location: Any = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``torch.load(path, map_location, weights_only=True)`` on every rank; returns once every rank has read the file.

    Without ``map_location`` tensors that were saved from any CUDA device go to this rank's current one (to the CPU
    where there is none), and all others to where they were. Otherwise as ``save_on_rank0``, and all hosts must see the
    file.

    Raises on the ranks that failed what ``torch.load`` raised, and on the others ``RankFailed`` that names the lowest
    of them, or those that did not come in time.
    """
    location = _own_device if map_location is None else map_location
    return _C._load(
        _group(group),
        os.fsencode(path),
        lambda: torch.load(path, map_location=location, weights_only=True),
    )


class PerRank:
    """What each rank has of its own, for ``torch.distributed.checkpoint`` and ``save_on_rank0``.

    Takes what has ``state_dict`` and ``load_state_dict``: ``dcp.save({"sizer": PerRank(sizer)}, ...)``. (Of one name
    torch keeps one rank's entry.) It is loaded by as many ranks as saved it: where a rank finds nothing of its own,
    all raise ``CheckpointException``. ``group`` is the default group; without one this process is rank 0::

        save_on_rank0({"model": model.module.state_dict(), "sizer": PerRank(sizer)}, path)
        PerRank(sizer).load_state_dict(load(path)["sizer"])  # ValueError where there is nothing of this rank
    """

    def __init__(self, stateful: Stateful, group: dist.ProcessGroup | None = None) -> None:
        group = _group(group)
        self._stateful = stateful
        self._key = f"rank{0 if group is None else group.rank()}"

    def state_dict(self) -> dict[str, Any]:
        return {self._key: self._stateful.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._key not in state:
            raise ValueError(
                f"nothing was saved for this rank (rank: {self._key[4:]}, saved: {', '.join(state) or 'nothing'}); "
                "load with as many ranks as saved, or leave this entry out"
            )
        self._stateful.load_state_dict(state[self._key])


def _with_all_ranks(state: Any, group: dist.ProcessGroup | None) -> Any:
    """`state` with every rank's in the place of each PerRank; raises on all ranks where one has none to give."""
    if type(state) is dict and any(isinstance(value, (PerRank, dict)) for value in state.values()):
        return {key: _with_all_ranks(value, group) for key, value in state.items()}
    if not isinstance(state, PerRank):
        return state
    own: dict[str, Any] | str
    error = None
    try:
        own = state.state_dict()
    except Exception as caught:  # the others wait
        own, error = text_of(caught), caught
    everybodys: list[Any] = [own]
    if group is not None and group.size() > 1:
        everybodys = [None] * group.size()
        dist.all_gather_object(everybodys, own, group=group)
    if error is not None:
        raise error
    failed = [rank for rank, theirs in enumerate(everybodys) if isinstance(theirs, str)]
    if failed:
        raise RuntimeError(
            f"a rank could not give its state for the checkpoint (rank: {failed[0]}): {everybodys[failed[0]]}"
        )
    return {key: value for theirs in everybodys for key, value in theirs.items()}


class BucketPlan:
    """For ``torch.distributed.checkpoint``: a model's bucket plan, which the next run is constructed with.

    Save ``BucketPlan(model)``; load an empty ``BucketPlan()`` first, and construct with ``plan=plan.of(net)``.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self._model = model
        self._saved: dict[str, Any] = {}

    def of(self, module: torch.nn.Module) -> str:
        """The plan for this module, "auto" if none was loaded. ``PlanMismatch`` if it was another model's."""
        if not self._saved:
            return "auto"
        here = _parameters_of(module)
        for now, then in zip_longest(here, self._saved["parameters"]):
            if now != then:
                raise _C.PlanMismatch(
                    f"the bucket plan is of another model (parameter here: {_shown(now)}, in the plan: "
                    f"{_shown(then)}); leave plan out, or load what this model has saved"
                )
        return str(self._saved["plan"])

    def state_dict(self) -> dict[str, str]:
        if self._model is not None:
            saved = {"plan": self._model.plan, "parameters": _parameters_of(self._model.module)}
            return {"plan": json.dumps(saved)}
        return {"plan": json.dumps(self._saved)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Raises ``ValueError`` if ``state`` is not what ``state_dict`` gave."""
        try:
            saved = json.loads(state["plan"])
            if saved:
                saved["plan"], saved["parameters"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"this is no bucket plan that state_dict gave (state: {state!r}); load what state_dict() of a "
                "BucketPlan returned"
            ) from None
        self._saved = saved


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None if group is None else member_of(group)


def _own_device(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None  # torch.load's default
    if not torch.cuda.is_available():
        return storage
    own = f"cuda:{torch.cuda.current_device()}"
    return torch.serialization.default_restore_location(storage, own)  # type: ignore[no-untyped-call]


def _parameters_of(module: torch.nn.Module) -> list[list[Any]]:
    """Name and shape of what is trained, in order, as JSON gives them back."""
    contents = Contents(module)
    return [
        [name, list(p.shape)] for name, p in zip(contents.names, contents.trainable, strict=True)
    ]


def _shown(parameter: list[Any] | None) -> str:
    return "none" if parameter is None else f"{parameter[0]} {parameter[1]}"
