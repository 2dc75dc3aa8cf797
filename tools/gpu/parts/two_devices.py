"""Two ranks over NCCL, and a pipeline of two stages, on two devices: their gradients."""

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
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import MIB, relative_difference, room
from torch import nn

ROWS, WIDTH = 1 << 13, 256


def run(small: bool) -> Iterator[Check]:
    """Yields the differences from the whole model: two ranks, one of them without room, and two stages."""
    if torch.cuda.device_count() < 2:
        yield skipped("two devices", f"{torch.cuda.device_count()} is here")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=2)
        found = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
    plain = max(one["plain"] for one in found)
    yield check(
        "NCCL: gradients", plain < 1e-10, f"differ by {plain:.1e} of the largest value", plain
    )
    retried = max(one["retried"] for one in found)
    pieces = [one["pieces"] for one in found]
    words = f"differ by {retried:.1e}; pieces by rank: {pieces}"
    good = retried < 1e-10 and pieces[0] == 1 < pieces[1]
    yield check("NCCL: a rank out of memory", good, words, retried)
    yield _stages()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU()] * 4
    return nn.Sequential(*copy.deepcopy(layers)).double()


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x)


def _batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


def _rank(rank: int, folder: str) -> None:
    import brimful

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    whole, inner, x = _net().cuda(), _net().cuda(), _batch().cuda()
    model = brimful.DistributedDataParallel(inner)
    found: dict[str, Any] = {}
    for _ in range(2):
        model.zero_grad()
        _loss(model, x.chunk(2)[rank]).backward()
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


def _stages() -> Check:
    import brimful

    whole, model, x = _net().cuda(), _net(), _batch()
    _loss(whole, x.cuda()).backward()
    halves = [model[:4].to("cuda:0"), model[4:].to("cuda:1")]
    pipe = brimful.Pipeline(halves, microbatches=4, loss_fn=nn.functional.mse_loss)
    pipe.step(x, x.to("cuda:1"))
    worst = relative_difference(
        [g.cpu() for g in _gradients(model)], [g.cpu() for g in _gradients(whole)]
    )
    words = f"differ by {worst:.1e} of the largest value"
    return check("a pipeline of two stages", worst < 1e-10, words, worst)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]
