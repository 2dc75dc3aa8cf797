"""How long the page of a long recording takes, and how large it is."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import common, intervals
from brimful import memory
from brimful.cli import report

IDS = ("probes.report_s", "probes.report_mb")
EVENTS, QUICK_EVENTS = 1_000_000, 20_000
ROUNDS, QUICK_ROUNDS = 7, 2


def measure(quick: bool) -> Iterator[common.Figure]:
    """Records a small model's training, and writes its page some times."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        path, page = Path(folder, "run.brimful"), Path(folder, "report.html")
        conditions = common.machine_conditions()
        conditions.update(_record(path, QUICK_EVENTS if quick else EVENTS))
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            if report.main([str(path), "-o", str(page)]) != 0:
                raise RuntimeError("the report failed")
            seconds.append(time.perf_counter() - began)
        page_mb = page.stat().st_size / 1e6
        conditions["recording_mb"] = path.stat().st_size / 1e6
        conditions["perfetto_s"] = _seconds([str(path), "--perfetto", str(page)])
        conditions["memory_viz_s"] = _seconds([str(path), "--memory-viz", str(page)])
    print(f"\nprobes.report_s: {intervals.median(seconds):.3f} s, {page_mb:.2f} MB, {conditions}")
    yield common.Figure(
        "probes.report_s",
        "s",
        intervals.median(seconds),
        min(seconds),
        max(seconds),
        rounds=rounds,
        conditions=conditions,
    )
    yield common.Figure(
        "probes.report_mb", "MB", page_mb, page_mb, page_mb, rounds=1, conditions=conditions
    )


def _seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    report.main(arguments)
    return time.perf_counter() - began


def _record(path: Path, events: int) -> dict[str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with memory.record(path):
        while memory.tracking_counts().events < events:
            F.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    [cpu] = [part for part in memory.load_recording(path).devices if part.device == "cpu"]
    return {"events": cpu.events, "lost_events": cpu.lost_events, "steps": cpu.steps}
