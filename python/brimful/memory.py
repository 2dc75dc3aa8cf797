"""What a device's memory holds, and how much it may hold.

CPU tensors are counted to the byte by brimful's allocator, which ``import brimful`` puts in front of torch's (tensors
from before the import, pinned memory and shared memory are not counted). CUDA devices are read from torch's caching
allocator. ``device`` is a ``torch.device`` or a string; a device that is neither a CPU nor a CUDA device of this
machine raises ``ValueError``.
"""

from __future__ import annotations

from typing import Literal

import torch

from brimful._C import (
    MemoryStats as Stats,
    SystemLimit,
    memory_release_cached,
    memory_reset_peak,
    memory_set_limit,
    memory_stats,
    memory_system_limit,
)

__all__ = [
    "Stats",
    "SystemLimit",
    "release_cached",
    "reset_peak",
    "set_limit",
    "stats",
    "system_limit",
]


def stats(device: str | torch.device) -> Stats:
    """Return the bytes in use, their peak since ``reset_peak``, the limit, and the number of refusals."""
    return memory_stats(device)


def set_limit(device: str | torch.device, bytes: int | Literal["auto"] | None) -> None:
    """Let the device hold at most ``bytes``; ``None`` removes the limit.

    Allocations beyond it raise ``torch.OutOfMemoryError``. A limit below what is in use frees nothing. On the CPU it
    holds to the byte; on CUDA it is torch's per-process fraction, which counts whole segments, cached ones included.
    ``"auto"``, for the CPU only, is ``system_limit().limit_bytes`` now, after malloc has given its free pages back: a
    container's kill becomes an error. Call it when model, optimizer and data loaders are there, and again when other
    processes have come or gone. Raises ``ValueError`` if ``bytes`` is negative or another word, and
    ``NotImplementedError`` where the system states no bound.
    """
    memory_set_limit(device, bytes)


def system_limit() -> SystemLimit:
    """What tensors may take of this system's CPU memory, and what decided it: a snapshot, which sets nothing.

    The tightest of the limits of this process's cgroup (v2, v1) and of those above it, RLIMIT_AS less the address space
    in use, and MemAvailable. ``limit_bytes`` counts the tensors that live now; ``free_bytes`` is what the bound leaves
    beyond what is in use, shared out equally among torchrun's ranks on this host (``LOCAL_WORLD_SIZE``) except under
    RLIMIT_AS; ``margin_bytes`` of it, a twentieth (64 MiB at least, a half at most), is kept for what is no tensor.
    ``source`` is "cgroup v2", "cgroup v1", "RLIMIT_AS" or "MemAvailable", ``where`` the file, ``bound_bytes`` what it
    says. Raises ``NotImplementedError`` where none can be read.
    """
    return memory_system_limit()


def reset_peak(device: str | torch.device) -> None:
    """Set ``stats(device).peak_bytes`` to what is in use now (on CUDA also torch's own peak)."""
    memory_reset_peak(device)


def release_cached(device: str | torch.device) -> None:
    """Give memory that no tensor holds back to the system. On CUDA this synchronises the device."""
    memory_release_cached(device)
