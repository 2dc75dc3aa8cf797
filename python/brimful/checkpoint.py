"""Checkpoints that rank 0 writes and every rank reads; the meeting of the ranks is done in C++."""

from __future__ import annotations

import os
from typing import IO, Any, cast

import torch
import torch.distributed as dist

from brimful import _C

__all__ = ["load", "save_on_rank0"]


def save_on_rank0(
    state: Any, path: str | os.PathLike[str], group: dist.ProcessGroup | None = None
) -> None:
    """``torch.save(state, path)`` on rank 0 only; returns on every rank once the file is whole.

    It is written beside ``path`` (as ``path + ".partial"``), brought to the disk and renamed: at any time ``path``
    holds the old file or the new one. All ranks call it, in the same order as other saves and loads of the group; they
    meet through the group's store, without a collective, and wait for rank 0 at most the group's timeout. ``group`` is
    the default group; without one this process is alone. One thread of a rank at a time.

    Raises on rank 0 what went wrong there (``OSError`` where the file system refused) and on the others ``RankFailed``
    with rank 0's words; then the old file is as it was. ``RankFailed`` names who is missing where ranks did not come in
    time; then the file is whole, old or new.
    """

    def write(file: _C._FileSink) -> None:
        torch.save(state, cast(IO[bytes], file))  # which uses write and flush

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


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def _own_device(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None  # torch.load's default
    if not torch.cuda.is_available():
        return storage
    own = f"cuda:{torch.cuda.current_device()}"
    return torch.serialization.default_restore_location(storage, own)  # type: ignore[no-untyped-call]
