"""Two ranks over gloo on one device: their gradients, and a shortage of one of them."""

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


def run(small: bool) -> Iterator[Check]:
    """Yields whether gradients are those of the whole model, without and with a rank that runs out of memory."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=2)
        found = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
    plain = max(one["plain"] for one in found)
    yield check("gradients", plain < 1e-10, f"differ by {plain:.1e} of the largest value", plain)
    retried = max(one["retried"] for one in found)
    pieces = [one["pieces"] for one in found]
    words = f"differ by {retried:.1e}; pieces by rank: {pieces}"
    yield check("a rank out of memory", retried < 1e-10 and pieces[0] == 1 < pieces[1], words)


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU()] * 4
    return nn.Sequential(*copy.deepcopy(layers)).to("cuda", torch.float64)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x)


def _rank(rank: int, folder: str) -> None:
    import brimful

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    whole, inner = _net(), _net()
    model = brimful.DistributedDataParallel(inner)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x.cuda()
    found: dict[str, Any] = {}
    for _ in range(2):
        model.zero_grad()
        _loss(model, x.chunk(2)[rank]).backward()
    whole.zero_grad()
    _loss(whole, x).backward()
    right = _gradients(whole)
    found["plain"] = relative_difference(_gradients(inner), right)
    model.zero_grad()
    sizer = brimful.BatchSizer(model)
    with room(64 * MIB if rank == 1 else 1 << 40):  # a layer takes 16 MiB
        outcome = sizer.step(x, _loss)
    found["pieces"] = outcome.pieces
    found["retried"] = relative_difference(_gradients(inner), right)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]
