"""What the parts share: the device, its limit, whether it is simulated."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

MIB = 1 << 20
_process = ctypes.CDLL(None)
SIMULATED = hasattr(_process, "sim_cuda_calls")
NEEDS_HARDWARE = "needs a real GPU: the simulated device has no times and runs no kernels"


def plant_error(code: int) -> None:
    """Each call for the simulated device 0 fails with this error from now on; 0 ends it."""
    _process.sim_cuda_plant_error(0, code)


def settle() -> None:
    """Nothing is pending, and nothing is cached."""
    import brimful

    gc.collect()
    torch.cuda.synchronize()
    brimful.memory.release_cached("cuda")


@contextlib.contextmanager
def room(bytes: int) -> Iterator[None]:
    """A limit of so much more than torch has reserved."""
    import brimful

    settle()
    reserved = brimful.memory.stats("cuda").reserved_bytes
    brimful.memory.set_limit("cuda", reserved + bytes)
    try:
        yield
    finally:
        brimful.memory.set_limit("cuda", None)


@contextlib.contextmanager
def filled(but: int) -> Iterator[None]:
    """The device is full, but for so many bytes."""
    settle()
    hog: Any = torch.empty(torch.cuda.mem_get_info()[0] - but, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del hog
        settle()


@contextlib.contextmanager
def alone_over_nccl() -> Iterator[None]:
    """The default group: this process alone, on the first device."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, NaNs and the signs of zeros included."""
    return one.dtype == other.dtype and torch.equal(
        one.detach().contiguous().view(-1).view(torch.uint8),
        other.detach().contiguous().view(-1).view(torch.uint8),
    )


def relative_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest difference of gradients, by the largest value of each."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        a, b = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (a, b))
        scale = max(float(b.abs().max()), 1e-30)
        worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
    return worst
