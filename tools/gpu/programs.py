"""Programs of allocations and steps, the same on any device: torch's statistics after each of their events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tools.gpu.device import MIB
from torch import nn

KB = 1024
COUNTERS = {
    "allocated": "allocated_bytes.all.current",
    "peak": "allocated_bytes.all.peak",
    "active": "active_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "segments": "segment.all.current",
    "refused": "num_ooms",
    "retried": "num_alloc_retries",
}
Event = tuple[str, dict[str, int]]


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cuda")


def _sizes() -> Iterator[str]:
    """Small and large pools, rounding, splitting, what is cached and what is given back."""
    kept = {}
    for count in (1, 512, 513, MIB - 1, MIB, MIB + 1, 5 * MIB, 10 * MIB, 11 * MIB, 33 * MIB):
        kept[count] = _bytes(count)
        yield f"take {count}"
    for count in (1, 513, MIB, 11 * MIB):
        del kept[count]
        yield f"free {count}"
    again = _bytes(9 * MIB)
    yield "take 9 MiB of what is cached"
    torch.cuda.empty_cache()
    yield "empty the cache"
    kept.clear()
    del again
    torch.cuda.empty_cache()
    yield "free all"


def _streams() -> Iterator[str]:
    """A block that another stream uses is not free before that stream is done with it."""
    side = torch.cuda.Stream()
    first = _bytes(4 * MIB)
    with torch.cuda.stream(side):
        second = _bytes(4 * MIB)
        yield "a stream has blocks of its own"
    first.record_stream(side)
    side.synchronize()
    del first
    torch.cuda.synchronize()
    third = _bytes(4 * MIB)
    yield "free, used by another stream"
    del second, third
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield "free all"


def _limit() -> Iterator[str]:
    """What is over a limit is refused, after the cache was given back."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((64 * MIB + 1) / total)
    kept = [_bytes(24 * MIB) for _ in range(2)]
    yield "take 48 of 64 MiB"
    for _ in range(2):
        try:
            _bytes(24 * MIB)
        except torch.OutOfMemoryError:
            yield "refused"
    del kept[0]
    yield "free 24 MiB"
    kept.append(_bytes(40 * MIB))
    yield "take 40 MiB: the cache is given back first"
    kept.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    yield "free all"


def _step() -> Iterator[str]:
    """Forward, backward and an optimizer, without what takes workspaces that depend on the device.

    Products of matrices do, and so does a sum over all of a large tensor: its kernel gathers the partial sums of many
    blocks in two temporaries whose size follows the number of multiprocessors (1,024 bytes on an H200 for the mean of
    768,000 values, and nothing for few values).
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.LayerNorm(256, device="cuda") for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    x = torch.randn(3000, 256, device="cuda")
    yield "parameters and a batch"
    for _ in range(2):
        loss = torch.tanh(model(x)).square()[0].mean()
        yield "forward"
        loss.backward()
        yield "backward"
        optimizer.step()
        yield "optimizer"
        optimizer.zero_grad()
        del loss
        yield "zero_grad"


PROGRAMS: dict[str, Callable[[], Iterator[str]]] = {
    "sizes": _sizes,
    "streams": _streams,
    "limit": _limit,
    "step": _step,
}


def events(name: str) -> list[Event]:
    """What a program does, and how torch's counters have changed since its start after each event."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = _counters()
    found = []
    for event in PROGRAMS[name]():
        now = _counters()
        found.append((event, {key: now[key] - start[key] for key in COUNTERS}))
    return found


def _counters() -> dict[str, int]:
    stats: dict[str, Any] = torch.cuda.memory_stats()
    return {key: int(stats[counter]) for key, counter in COUNTERS.items()}
