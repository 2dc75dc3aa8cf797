"""Pictures of two ranks: what each did when, on one clock."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from chart import BLUE, GREEN, GREY, ORANGE, RED, TEAL, Chart
from torch import nn

import brimful
from brimful import memory

Span = tuple[float, float, str]


class Diary:
    """Spans of forward, backward and waiting of one rank, reported by hooks of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.spans: list[Span] = []
        self._doing, self._since, self._last = "", 0.0, 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begins(self, what: str) -> None:
        now = time.monotonic()
        if self._doing:
            # Behind a backward's last gradient the rank waits for the others.
            end = self._last if self._doing == "backward" and self._last > self._since else now
            self.spans.append((self._since, end, self._doing))
            if end < now:
                self.spans.append((end, now, "waits"))
        self._doing, self._since = what, now

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._last = time.monotonic()


def _rank(rank: int, port: int, work: Callable[[int], Any], answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    answers.put((rank, work(rank)))
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` of both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(r, port, work, answers)) for r in range(2)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return [found[0], found[1]]


def net(width: int = 512, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def _retried_step(rank: int) -> tuple[list[Span], float]:
    model = brimful.DistributedDataParallel(net(), plan="ordered", bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizer = brimful.BatchSizer(model, optimizer)
    diary = Diary(model)
    batch = torch.randn(512, 512), torch.randint(10, (512,))
    cut_at = 0.0

    def loss_fn(model: nn.Module, piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if cut_at:  # what took the memory has gone when the step is repeated
            memory.set_limit("cpu", None)
        diary.begins("forward")
        loss = nn.functional.cross_entropy(model(piece[0]), piece[1])
        diary.begins("backward")
        return loss

    def step() -> None:
        sizer.step(batch, loss_fn)
        diary.begins("")
        optimizer.step()
        optimizer.zero_grad()

    def cut(_: torch.Tensor) -> None:
        nonlocal cut_at
        if rank == 1 and not cut_at:
            cut_at = time.monotonic()
            memory.set_limit("cpu", memory.stats("cpu").used_bytes // 2)

    for _ in range(4):
        step()
    diary.spans.clear()
    model.module[1][0].weight.register_hook(cut)
    dist.barrier()
    step()
    return diary.spans, cut_at


COLOURS = {"forward": BLUE, "backward": ORANGE, "waits": GREY}


def _lanes(title: str, everyones: list[list[Span]]) -> tuple[Chart, float]:
    begin = min(span[0] for spans in everyones for span in spans)
    end = max(span[1] for spans in everyones for span in spans)
    chart = Chart(title, "ms", 1e3 * (end - begin))
    for rank, spans in enumerate(everyones):
        chart.lane(f"rank {rank}")
        for first, last, what in spans:
            bar = 1e3 * (first - begin), 1e3 * (last - begin), COLOURS[what]
            chart.bar(f"rank {rank}", *bar, what)
    return chart, begin


def draw_step() -> str:
    """A step of two ranks in which rank 1 runs out of memory in backward."""
    (first, _), (second, cut_at) = on_two_ranks(_retried_step)
    chart, begin = _lanes("One step of two ranks, repeated", [first, second])
    chart.mark(1e3 * (cut_at - begin), "rank 1 runs out of memory")
    return chart.svg()


def _failed_step(rank: int) -> tuple[list[Span], float]:
    model = brimful.DistributedDataParallel(net())
    diary = Diary(model)
    raised_at = 0.0
    for step in range(4):
        diary.spans.clear()
        x, y = torch.randn(256, 512), torch.randint(10, (256,))
        dist.barrier()
        try:
            with model.step():
                diary.begins("forward")
                output = model(x)
                if rank == 1 and step == 3:
                    raise ValueError("a label is out of range")
                loss = nn.functional.cross_entropy(output, y)
                diary.begins("backward")
                loss.backward()
        except Exception:
            raised_at = time.monotonic()
        diary.begins("")
        model.zero_grad()
    return diary.spans, raised_at


def draw_failure() -> str:
    """A step of two ranks in which rank 1 raises."""
    (first, told_at), (second, raised_at) = on_two_ranks(_failed_step)
    chart, begin = _lanes("One step of two ranks: an error on rank 1", [first, second])
    chart.mark(1e3 * (raised_at - begin), "rank 1 raises ValueError")
    chart.mark(1e3 * (told_at - begin), "rank 0 raises RankFailed", TEAL)
    return chart.svg()


def _timed_step(rank: int) -> dict[str, Any]:
    model = brimful.DistributedDataParallel(net(), plan="ordered", bucket_cap_mb=1)
    x, y = torch.randn(256, 512), torch.randint(10, (256,))
    for _ in range(8):
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad()
    return model.telemetry()


def draw_buckets() -> str:
    """Buckets of a step of rank 0: filled during backward, reduced meanwhile."""
    times = on_two_ranks(_timed_step)[0]
    chart = Chart(
        "Buckets of one step of rank 0", "ms since the forward began", times["total_ms"] * 1.02
    )
    for number, bucket in enumerate(times["buckets"]):
        lane = f"bucket {number}"
        chart.lane(lane)
        word = f"{bucket['bytes'] / (1 << 20):.1f} MiB"
        chart.bar(lane, bucket["first_ms"], bucket["ready_ms"], ORANGE, "gradients come", word)
        chart.bar(lane, bucket["ready_ms"], bucket["launch_ms"], RED, "waits to leave")
        chart.bar(lane, bucket["launch_ms"], bucket["done_ms"], GREEN, "all-reduce", word)
    return chart.svg()
