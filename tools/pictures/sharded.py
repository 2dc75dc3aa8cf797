"""A picture of two ranks of a sharded model, of which one fails."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from chart import BLUE, GREEN, ORANGE, Chart
from ranks import Span, net, on_two_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import brimful

COLOURS = {"forward": BLUE, "backward": ORANGE, "issues the rest": GREEN}


class _Spans:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._doing, self._since = "", 0.0

    def begins(self, what: str) -> None:
        now = time.monotonic()
        if self._doing:
            self.spans.append((self._since, now, self._doing))
        self._doing, self._since = what, now


def _step(rank: int) -> tuple[list[Span], float]:
    model = net()
    mesh = init_device_mesh("cpu", (2,))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sizer = brimful.BatchSizer(model)
    diary, failed_at, due = _Spans(), 0.0, False
    batch = torch.randn(512, 512), torch.randint(10, (512,))

    def fail(gradient: torch.Tensor) -> None:
        nonlocal failed_at, due
        if due:
            due, failed_at = False, time.monotonic()
            raise torch.OutOfMemoryError("no room")

    def loss_fn(model: torch.nn.Module, piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        diary.begins("forward")
        loss = torch.nn.functional.cross_entropy(model(piece[0]), piece[1])
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        loss.register_hook(lambda _: engine.queue_callback(lambda: diary.begins("")))
        diary.begins("backward")
        return loss

    model[3].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    reset = sizer._shards.reset

    def watched() -> None:
        if failed_at and diary._doing == "backward":
            diary.begins("issues the rest")
        reset()

    sizer._shards.reset = watched
    for _ in range(4):
        sizer.step(batch, loss_fn)
        model.zero_grad()
    diary.spans.clear()
    due = rank == 1
    dist.barrier()
    sizer.step(batch, loss_fn)
    diary.begins("")
    return diary.spans, failed_at


def draw_drain() -> str:
    """A step of two ranks in which rank 1 runs out of memory in backward, and issues what rank 0 waits for."""
    (first, _), (second, failed_at) = on_two_ranks(_step)
    begin = min(span[0] for spans in (first, second) for span in spans)
    end = max(span[1] for spans in (first, second) for span in spans)
    chart = Chart("One step of a model that two ranks share, repeated", "ms", 1e3 * (end - begin))
    for rank, spans in enumerate((first, second)):
        chart.lane(f"rank {rank}")
        for since, until, what in spans:
            bar = 1e3 * (since - begin), 1e3 * (until - begin), COLOURS[what]
            chart.bar(f"rank {rank}", *bar, what)
    chart.mark(1e3 * (failed_at - begin), "rank 1 runs out of memory")
    return chart.svg()
