"""Two ranks: their gradients against those of the whole model, and a shortage of one of them."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tools.gpu.check import Check, check
from tools.gpu.device import MIB, relative_difference, room
from torch import nn

ROWS, WIDTH = 1 << 13, 256


def compare(backend: str, has_own_device: bool) -> Iterator[Check]:
    """Yields whether gradients are those of the whole model, without and with a rank that runs out of memory."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, backend, has_own_device), nprocs=2)
        found = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
    plain = max(one["plain"] for one in found)
    yield check("gradients", plain < 1e-10, f"differ by {plain:.1e} of the largest value", plain)
    retried = max(one["retried"] for one in found)
    pieces = [one["pieces"] for one in found]
    words = f"differ by {retried:.1e}; pieces by rank: {pieces}"
    good = retried < 1e-10 and pieces[0] == 1 < pieces[1]
    yield check("a rank out of memory", good, words, retried)


def net() -> nn.Sequential:
    """The same parameters each time."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU()] * 4
    return nn.Sequential(*copy.deepcopy(layers)).double()


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of a batch against itself."""
    return nn.functional.mse_loss(model(x), x)


def batch() -> torch.Tensor:
    """The same rows each time, of both ranks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those that are there."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def _rank(rank: int, folder: str, backend: str, has_own_device: bool) -> None:
    import brimful

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    torch.cuda.set_device(rank if has_own_device else 0)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    whole, inner, x = net().cuda(), net().cuda(), batch().cuda()
    model = brimful.DistributedDataParallel(inner)
    found: dict[str, Any] = {}
    for _ in range(2):
        model.zero_grad()
        loss(model, x.chunk(2)[rank]).backward()
    loss(whole, x).backward()
    right = gradients(whole)
    found["plain"] = relative_difference(gradients(inner), right)
    model.zero_grad()
    sizer = brimful.BatchSizer(model)
    with room(64 * MIB if rank == 1 else 1 << 40):  # a layer takes 16 MiB
        outcome = sizer.step(x, loss)
    found["pieces"] = outcome.pieces
    found["retried"] = relative_difference(gradients(inner), right)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()
