"""The reducer over NCCL with one rank, which makes all its collectives (whole_path), against the bare module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import SIMULATED, alone_over_nccl, relative_difference
from torch import nn

STEPS = 4
BF16 = {"wire_dtype": torch.bfloat16}


class Words(nn.Module):
    """Gradients that are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(500, 32, sparse=True), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(x).mean(1))
        return out


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def _with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64))


def _rows() -> torch.Tensor:
    return torch.randn(32, 64, device="cuda")


def _words() -> torch.Tensor:
    return torch.randint(500, (32, 6), device="cuda")


def _hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


Make = Callable[[], nn.Module]
Draw = Callable[[], torch.Tensor]
CASES: dict[str, tuple[Make, Draw, dict[str, Any], float]] = {
    "fp32": (_perceptron, _rows, {}, 0.0),
    "bf16": (_perceptron, _rows, BF16, 1 / 128),
    "error feedback": (_perceptron, _rows, {**BF16, "error_feedback": True}, 1 / 64),
    "sparse": (Words, _words, {}, 1e-6),
    "hook": (_perceptron, _rows, {}, 0.0),
    "BatchNorm": (_with_batch_norm, _rows, {}, 0.0),
    "side stream": (_perceptron, _rows, {}, 0.0),
}


def run(small: bool) -> Iterator[Check]:
    """Yields a check for each case: gradients, buffers, and those of a sizer's step in pieces."""
    with alone_over_nccl():
        for name in CASES:
            if name == "sparse" and SIMULATED:
                yield skipped(name, "the simulated device has no sparse tensors")
            else:
                yield _case(name)


def _case(name: str) -> Check:
    import brimful
    from brimful.reducer._whole_path import whole_path

    make, draw, options, allowed = CASES[name]
    torch.manual_seed(0)
    bare = make().cuda()
    with whole_path():
        model = brimful.DistributedDataParallel(copy.deepcopy(bare), **options)
    if name == "hook":
        model.register_comm_hook(None, _hook)
    side = torch.cuda.Stream() if name == "side stream" else None
    worst = 0.0
    for _ in range(STEPS):
        x = draw()
        _backward(bare, x)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            _backward(model, x)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        worst = max(worst, relative_difference(_gradients(model.module), _gradients(bare)))
        bare.zero_grad()
        model.zero_grad()
    buffers = all(map(torch.equal, model.module.buffers(), bare.buffers()))
    split = 0.0
    if name != "BatchNorm":  # its pieces are normalised by themselves
        outcome = brimful.BatchSizer(model).step(
            x, lambda m, p: m(p).square().mean(), split=[20, 12]
        )
        _backward(bare, x)
        split = relative_difference(_gradients(model.module), _gradients(bare))
        assert outcome.pieces == 2
    words = f"differs by {worst:.1e} of the largest value, in two pieces by {split:.1e}"
    return check(name, worst <= allowed and split <= max(allowed, 1e-5) and buffers, words, worst)


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]
