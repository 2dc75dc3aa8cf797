"""What a device's memory holds, and how much it may hold.

CPU tensors are counted to the byte by brimful's allocator, which ``import brimful`` puts in front of torch's (tensors
from before the import, pinned memory and shared memory are not counted). CUDA devices are read from torch's caching
allocator. ``device`` is a ``torch.device`` or a string; a device that is neither a CPU nor a CUDA device of this
machine raises ``ValueError``.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from brimful._C import (
    _RING_BYTES,
    DeviceRecording,
    LiveBlock,
    MemoryPeak as Peak,
    MemoryRecording as Recording,
    MemorySite as Site,
    MemoryStats as Stats,
    OomFinding,
    OomReport,
    SiteUse,
    SystemLimit,
    TrackingCounts,
    _save_recording_anywhere,
    memory_context_bytes,
    memory_current_step as current_step,
    memory_find_block,
    memory_last_oom as last_oom,
    memory_live_blocks,
    memory_live_by_category,
    memory_live_by_site,
    memory_load_recording,
    memory_mark_step as mark_step,
    memory_peak_by_category,
    memory_recording as recording,
    memory_release_cached,
    memory_reset_peak,
    memory_set_limit,
    memory_stats,
    memory_system_limit,
    memory_tracking as tracking,
    memory_tracking_counts,
)
from brimful.memory import _labels, _tracking

__all__ = [
    "DeviceRecording",
    "LiveBlock",
    "OomFinding",
    "OomReport",
    "Peak",
    "Recording",
    "Site",
    "SiteTable",
    "SiteUse",
    "Stats",
    "SystemLimit",
    "TrackingCounts",
    "context_bytes",
    "current_step",
    "find_block",
    "last_oom",
    "live",
    "live_blocks",
    "live_by_category",
    "load_recording",
    "mark_step",
    "peak_by_category",
    "record",
    "recording",
    "release_cached",
    "reset_peak",
    "set_limit",
    "start_recording",
    "start_tracking",
    "stats",
    "stop_recording",
    "stop_tracking",
    "system_limit",
    "track",
    "tracking",
    "tracking_counts",
]


def stats(device: str | torch.device) -> Stats:
    """Return the bytes in use, their peak since ``reset_peak``, the limit, and the number of refusals.

    All are ``None`` for a CUDA device whose allocator keeps no statistics (``CUDAPluggableAllocator``).
    """
    return memory_stats(device)


def set_limit(device: str | torch.device, bytes: int | Literal["auto"] | None) -> None:
    """Let the device hold at most ``bytes``; ``None`` removes the limit.

    Allocations beyond it raise ``torch.OutOfMemoryError``. A limit below what is in use frees nothing. On the CPU it
    holds to the byte; on CUDA it is torch's per-process fraction, which counts whole segments, cached ones included.
    ``"auto"``, for the CPU only, is ``system_limit().limit_bytes`` now, after malloc has given its free pages back: a
    container's kill becomes an error. Call it when model, optimizer and data loaders are there, and again when other
    processes have come or gone. Raises ``ValueError`` if ``bytes`` is negative or another string, and
    ``NotImplementedError`` where the system states no bound, or the device's allocator takes no limit.
    """
    if not (bytes is None or isinstance(bytes, str)):
        try:
            bytes = operator.index(bytes)
        except TypeError:
            raise TypeError(
                f"a limit is a whole number of bytes, 'auto' or None (bytes: {bytes!r}); write int(...) around it"
            ) from None
        if bytes >= 1 << 63:
            raise ValueError(
                f"the limit is too large (bytes: {bytes}, most: 2^63 - 1); None removes the limit"
            )
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


def start_tracking(
    *,
    modules: nn.Module | None = None,
    report: str | os.PathLike[str] | None = None,
) -> None:
    """Keep each allocation from now on, of all threads, with its line of Python, its step and its phase.

    The line is the innermost one outside torch and brimful; in backward it is the one whose forward made the graph's
    node. A step ends behind each ``optimizer.step()``, or as soon as it was called once, at ``mark_step()``.
    With ``modules`` the blocks also carry the name of the innermost of its submodules (a hook around each forward).
    Raises ``RuntimeError`` if tracking is on. Forked children (DataLoader workers) do not track.

    An out-of-memory error meanwhile reports what filled the memory, and ``last_oom()`` has all of it. ``report``
    (default: the variable ``BRIMFUL_OOM_REPORT``) is the file of an HTML page with the newest one.
    """
    _tracking.start(modules, None if report is None else os.fspath(report))


def stop_tracking() -> None:
    """End it. ``peak_by_category`` stays readable until the next start; nothing happens where tracking is off."""
    _tracking.stop()


@contextmanager
def track(
    *,
    modules: nn.Module | None = None,
    report: str | os.PathLike[str] | None = None,
) -> Iterator[None]:
    """``start_tracking`` and ``stop_tracking`` around a block. CUDA's out-of-memory errors leave it with a note."""
    start_tracking(modules=modules, report=report)
    try:
        yield
    except torch.OutOfMemoryError as error:
        _tracking.add_oom_note(error)
        raise
    finally:
        stop_tracking()


def start_recording(*, ring_bytes: int = _RING_BYTES, modules: nn.Module | None = None) -> None:
    """Keep each birth and death of a block from now on, in a ring of ``ring_bytes`` for each device in use.

    The oldest make room when it is full (48 bytes each). Starts tracking where it is off, with ``modules`` as there.
    Raises ``RuntimeError`` if memory is recorded already, and ``ValueError`` for a ring of less than 64 KiB. Forked
    children do not record.
    """
    _tracking.start_recording(ring_bytes, modules)


def stop_recording(
    *,
    models: nn.Module | Sequence[nn.Module] | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> Recording:
    """End it, and tracking too if ``start_recording`` began that; ``save(path)`` what it returns.

    Blocks that live now have the categories that ``peak_by_category`` would give them. Raises ``RuntimeError`` if
    memory is not recorded.
    """
    return _tracking.stop_recording(_labels_of(models, optimizers))


@contextmanager
def record(
    path: str | os.PathLike[str] = "memory.brimful",
    *,
    ring_bytes: int = _RING_BYTES,
    modules: nn.Module | None = None,
    models: nn.Module | Sequence[nn.Module] | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> Iterator[None]:
    """Record a block of code into a file that ``brimful report`` reads, also where it ends with an exception.

    Each rank has a file of its own: ``{rank}`` in ``path`` is replaced, or the rank comes before the suffix. Where the
    file cannot be written, a warning names the one in the folder of temporary files that was written instead.
    """
    start_recording(ring_bytes=ring_bytes, modules=modules)
    try:
        yield
    finally:
        if recording():  # not in a forked child
            made = stop_recording(models=models, optimizers=optimizers)
            _save_recording_anywhere(made, os.fsencode(path))


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a file of ``record``; ``ValueError`` where it is none, or not whole."""
    return memory_load_recording(os.fspath(path))


class SiteTable(list[SiteUse]):
    """What lives, by line and phase, the most bytes first; as text it is a table."""

    def __str__(self) -> str:
        rows = [("bytes", "blocks", "phase", "steps", "line")]
        for use in self:
            steps = f"{use.born[0][0]}..{use.born[-1][0]}"
            rows.append((f"{use.bytes:,}", str(use.blocks), use.phase, steps, str(use.site)))
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        lines = []
        for size, blocks, *texts, line in rows:
            cells = [size.rjust(widths[0]), blocks.rjust(widths[1])]
            cells += [text.ljust(width) for text, width in zip(texts, widths[2:], strict=True)]
            lines.append("  ".join([*cells, line]))
        return "\n".join(lines)


def live(device: str | torch.device = "cpu") -> SiteTable:
    """Return what is in use of what was taken since ``start_tracking``, by line."""
    return SiteTable(memory_live_by_site(device))


def live_blocks(device: str | torch.device = "cpu") -> list[LiveBlock]:
    """Return each block in use that was taken since ``start_tracking``, the oldest first."""
    return memory_live_blocks(device)


def find_block(tensor: torch.Tensor) -> LiveBlock | None:
    """Return the block of a tensor's storage, or ``None`` where the table does not have it."""
    return memory_find_block(tensor)


def tracking_counts(device: str | torch.device = "cpu") -> TrackingCounts:
    """Return how many allocations were seen, and how many of them without a line."""
    return memory_tracking_counts(device)


def peak_by_category(
    device: str | torch.device = "cpu",
    *,
    models: nn.Module | Sequence[nn.Module] | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> Peak:
    """Return what the device's memory was used for at its peak since ``start_tracking`` or ``reset_peak``.

    ``by_category`` adds up to the allocator's peak, to the byte: parameters, buffers, gradients and optimizer state are
    those of ``models`` and ``optimizers`` (without them: of all that this process has, found by one pass of the garbage
    collector); temporaries were freed in the phase in which they were taken; of the rest, what forward took is
    activations, what backward took gradients and what the optimizer took its state. Raises ``RuntimeError`` if tracking
    was never on.
    """
    return memory_peak_by_category(device, _labels_of(models, optimizers))


def live_by_category(
    device: str | torch.device = "cpu",
    *,
    models: nn.Module | Sequence[nn.Module] | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> dict[str, int]:
    """Return the same of what is in use now."""
    return memory_live_by_category(device, _labels_of(models, optimizers))


def context_bytes(device: str | torch.device) -> int | None:
    """Return what this process has of a CUDA device beside torch's allocator: context, kernels, libraries' own buffers.

    In no category, as it is in no allocator's count. ``None`` on the CPU, and where the driver does not report it (in a
    container, say). It is asked through NVML and waits for nothing. Raises ``ValueError`` if there is no such device.
    """
    return memory_context_bytes(device)


def _labels_of(
    models: nn.Module | Iterable[nn.Module] | None,
    optimizers: Optimizer | Iterable[Optimizer] | None,
) -> list[_labels.Label]:
    if models is None and optimizers is None:
        models, optimizers = _labels.found()
    return _labels.labels_of(
        [models] if isinstance(models, nn.Module) else list(models or ()),
        [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ()),
    )
