"""What a device's memory holds, and how much it may hold.

CPU tensors are counted to the byte by brimful's allocator, which ``import brimful`` puts in front of torch's (tensors
from before the import, pinned memory and shared memory are not counted). CUDA devices are read from torch's caching
allocator. ``device`` is a ``torch.device`` or a string; a device that is neither a CPU nor a CUDA device of this
machine raises ``ValueError``.
"""

from __future__ import annotations

import torch

from brimful._C import (
    MemoryStats as Stats,
    memory_release_cached,
    memory_reset_peak,
    memory_set_limit,
    memory_stats,
)

__all__ = ["Stats", "release_cached", "reset_peak", "set_limit", "stats"]


def stats(device: str | torch.device) -> Stats:
    """Return the bytes in use, their peak since ``reset_peak``, the limit, and the number of refusals."""
    return memory_stats(device)


def set_limit(device: str | torch.device, bytes: int | None) -> None:
    """Let the device hold at most ``bytes``; ``None`` removes the limit.

    Allocations beyond it raise ``torch.OutOfMemoryError``. A limit below what is in use frees nothing. On the CPU it
    holds to the byte; on CUDA it is torch's per-process fraction, which counts whole segments, cached ones included.
    Raises ``ValueError`` if ``bytes`` is negative.
    """
    memory_set_limit(device, bytes)


def reset_peak(device: str | torch.device) -> None:
    """Set ``stats(device).peak_bytes`` to what is in use now (on CUDA also torch's own peak)."""
    memory_reset_peak(device)


def release_cached(device: str | torch.device) -> None:
    """Give memory that no tensor holds back to the system. On CUDA this synchronises the device."""
    memory_release_cached(device)
