"""Draws the pictures of the documentation from real runs on the CPU, into docs/pictures.

    python tools/pictures/draw.py [NAME ...]      # all, or some: step, buckets, ...

Bytes and numbers of operators are the same in every run; times are this machine's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from chart import BLUE, GREY, ORANGE, Chart
from fleet import draw_fleet
from ladder import draw_ladder
from probes import (
    draw_leak,
    draw_leak_rule,
    draw_operators,
    draw_summary,
    photograph_oom_report,
    photograph_report,
)
from ranks import draw_buckets, draw_failure, draw_step
from runs import COLOURS, MIB, EveryOperator, batch_of, cross_entropy, mlp, used
from sharded import draw_drain
from torch import nn

import brimful
from brimful import memory

PICTURES = Path(__file__).resolve().parent.parent.parent / "docs" / "pictures"


def draw_retry() -> str:
    """The bytes in use during a step that runs out of memory, and the one after it."""
    model, batch = mlp(), batch_of(2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizer = brimful.BatchSizer(model, optimizer)
    limit = used() + 64
    memory.set_limit("cpu", int(limit * MIB))
    samples, refused, steps = [used()], [], []

    def look() -> None:
        ooms = memory.stats("cpu").ooms
        if ooms > look.ooms:  # type: ignore[attr-defined]
            refused.append(len(samples))
        look.ooms = ooms  # type: ignore[attr-defined]
        samples.append(used())

    look.ooms = memory.stats("cpu").ooms  # type: ignore[attr-defined]
    with EveryOperator(look):
        for _ in range(2):
            steps.append(len(samples))
            outcome = sizer.step(batch, cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    memory.set_limit("cpu", None)
    chart = Chart(
        f"Two steps of 2048 rows: 1 piece, repeated in {outcome.pieces}",
        "operators since the beginning",
        len(samples),
        y_label="MiB in use",
        y_end=limit * 1.12,
    )
    chart.area(range(len(samples)), [0] * len(samples), samples, BLUE)
    chart.level(limit, "limit")
    for number, at in enumerate(steps):
        chart.mark(at, f"step {number}", "#1f2933")
    for at in refused:
        chart.mark(at, "an allocation is refused")
    return chart.svg()


def draw_categories() -> str:
    """What lives, by category, operator by operator, in the second step with Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    samples: list[dict[str, int]] = []
    parts: list[tuple[int, str]] = []

    def look() -> None:
        samples.append(memory.live_by_category(models=model, optimizers=optimizer))

    with memory.track():
        for step in range(2):
            batch = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
            with EveryOperator(look if step else lambda: None):
                parts.append((len(samples), "forward"))
                loss = cross_entropy(model, batch)
                parts.append((len(samples), "backward"))
                loss.backward()
                parts.append((len(samples), "optimizer"))
                optimizer.step()
                parts.append((len(samples), "zero_grad"))
                optimizer.zero_grad()
                look()
            del loss, batch
    sums = [sum(sample.values()) / MIB for sample in samples]
    chart = Chart(
        "One step of a small CNN with Adam, 64 images",
        "operators since the step began",
        len(samples) - 1,
        y_label="MiB in use",
        y_end=max(sums) * 1.15,
    )
    low = [0.0] * len(samples)
    for category, colour in COLOURS.items():
        high = [a + sample.get(category, 0) / MIB for a, sample in zip(low, samples, strict=True)]
        if high != low:
            chart.area(range(len(samples)), low, high, colour, category.replace("_", " "))
        low = high
    for at, name in parts[4:]:
        chart.mark(at, name, "#1f2933")
    return chart.svg()


def draw_forecast() -> str:
    """Peaks forecast from 2, 3 and 16 rows, the peaks of the steps themselves, and what two peaks would forecast."""
    model = mlp(512, 6)
    optimizer = torch.optim.Adam(model.parameters())

    def summary_of(rows: int) -> brimful.summary:
        return brimful.summary(model, batch_of(rows), optimizer=optimizer, loss_fn=cross_entropy)

    rows = [64, 128, 256, 512, 768, 1024]
    found = [summary_of(count) for count in rows]
    predicted = [(summary.predicted_bytes or 0) / MIB for summary in found]
    seen = [summary.peak_bytes / MIB for summary in found]
    few = [summary_of(count).peak_bytes / MIB for count in (8, 16)]
    line = [few[1] + (few[1] - few[0]) / 8 * (count - 16) for count in rows]
    worst = max(abs(a / b - 1) for a, b in zip(predicted, seen, strict=True))
    chart = Chart(
        f"The peak of a step, predicted from 2, 3 and 16 rows: off by {100 * worst:.2f} % at most",
        "rows of the batch",
        max(rows) * 1.05,
        y_label="MiB at the peak",
        y_end=max(seen) * 1.15,
    )
    chart.line(rows, line, GREY, "a line through the peaks of 8 and 16 rows", dashed=True)
    chart.line(rows, predicted, BLUE, "predicted")
    chart.line(rows, seen, ORANGE, "measured", dashed=True, marks=True)
    return chart.svg()


def draw_regrowth() -> str:
    """Pieces of a step while the budget falls and rises again."""
    model, batch = mlp(256, 6), batch_of(512, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizer = brimful.BatchSizer(model, optimizer)

    def step() -> tuple[float, int, int]:
        outcome = sizer.step(batch, cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        return outcome.peak_bytes / MIB, outcome.pieces, outcome.retries

    whole, _, _ = step()
    base = used()
    limits, peaks, words = [], [], []
    pieces_before = 1
    for number in range(36):
        share = 0.45 if 10 <= number < 22 else 1.1
        limits.append(base + (whole - base) * share)
        memory.set_limit("cpu", int(limits[-1] * MIB))
        peak, pieces, retries = step()
        peaks.append(peak)
        if pieces != pieces_before or retries:
            words.append((number, f"{pieces} piece{'s' if pieces > 1 else ''}"))
        pieces_before = pieces
    memory.set_limit("cpu", None)
    chart = Chart(
        "A budget that falls and rises: pieces follow it",
        "step",
        len(peaks),
        y_label="MiB",
        y_end=max(limits) * 1.15,
    )
    steps = range(len(peaks))
    chart.area(steps, [0] * len(peaks), peaks, BLUE, "peak of the step")
    chart.stairs(steps, limits, ORANGE, "limit")
    for number, text in words:
        chart.mark(number, text, "#1f2933")
    return chart.svg()


def draw_mixed() -> str:
    """The peak by category in float32 and with bfloat16 inside."""
    import torch.distributed as dist
    from torch.nn.parallel.distributed import _MixedPrecision

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    peaks = {}
    for name, options in {
        "float32": {},
        "bfloat16": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
    }.items():
        model = brimful.DistributedDataParallel(mlp(256, 6), **options)
        optimizer = torch.optim.Adam(model.parameters())
        batch = batch_of(1024, 256)
        with memory.track():
            for _ in range(2):
                memory.reset_peak("cpu")
                cross_entropy(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks[name] = memory.peak_by_category(models=model, optimizers=optimizer)
    dist.destroy_process_group()
    end = max(peak.bytes for peak in peaks.values()) / MIB
    chart = Chart("The peak of a step, by category", "MiB", end * 1.04)
    for name, peak in peaks.items():
        chart.lane(name)
        at = 0.0
        for category, colour in COLOURS.items():
            size = peak.by_category.get(category, 0) / MIB
            if size > 0:
                chart.bar(name, at, at + size, colour, category.replace("_", " "), f"{size:.1f}")
            at += size
    return chart.svg()


class Work(torch.autograd.Function):
    """Takes the time of a device that works by itself: so long forward, twice as long backward."""

    @staticmethod
    def forward(context, x, forward_s):  # type: ignore[no-untyped-def]
        context.backward_s = 2 * forward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context, gradient):  # type: ignore[no-untyped-def]
        time.sleep(context.backward_s)
        return gradient, None


class Stage(nn.Linear):
    def __init__(self, forward_s: float) -> None:
        super().__init__(16, 16)
        self._forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(super().forward(x), self._forward_s)


def _four_ranks(schedule: str, stages: int) -> str:
    """A step of stages that share 30 ms of forward a rank, as measured above the plan."""
    pipe = brimful.Pipeline(
        [Stage(0.03 * 4 / stages) for _ in range(stages)],
        devices=["cpu"] * 4,
        schedule=schedule,
        microbatches=8,
        loss_fn=nn.functional.mse_loss,
    )
    for _ in range(5):
        pipe.step(torch.randn(16, 16), torch.randn(16, 16))
    return pipe.trace_svg()


def draw_pipeline() -> str:
    return _four_ranks("1f1b", stages=4)


def draw_interleaved() -> str:
    return _four_ranks("interleaved_1f1b", stages=8)


DRAWINGS: dict[str, Callable[[], str]] = {
    "retry": draw_retry,
    "ladder": draw_ladder,
    "step": draw_step,
    "failure": draw_failure,
    "drain": draw_drain,
    "buckets": draw_buckets,
    "forecast": draw_forecast,
    "regrowth": draw_regrowth,
    "mixed": draw_mixed,
    "pipeline": draw_pipeline,
    "categories": draw_categories,
    "leak": draw_leak,
    "leak-rule": draw_leak_rule,
    "summary": draw_summary,
    "operators": draw_operators,
    "interleaved": draw_interleaved,
    "fleet": draw_fleet,
}
PHOTOGRAPHS: dict[str, Callable[[Path], None]] = {
    "oom-report": photograph_oom_report,
    "report": photograph_report,
}


def main(wanted: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    if len(wanted) != 1:  # each in a process of its own, whose memory holds nothing else
        for name in wanted or [*DRAWINGS, *PHOTOGRAPHS]:
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    torch.set_num_threads(1)
    (name,) = wanted
    print(name)
    if name in PHOTOGRAPHS:
        PHOTOGRAPHS[name](PICTURES / f"{name}.png")
    else:
        (PICTURES / f"{name}.svg").write_text(DRAWINGS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
