"""What metrics add to a step: the CPU time of looking after it, and of a sample a second with its exporter's thread."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import brimful
from benchmarks import common, intervals
from benchmarks.sizer import overhead
from brimful.metrics import JsonLines, Metrics, OpenTelemetry, Prometheus, TensorBoard

IDS = ("fleet.metrics",)
ROUNDS, QUICK_ROUNDS = 60, 5
STEPS = 50  # of the small model, in a round
INTERVAL_S = 1.0
WITHOUT = "without"


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields (a look + a sample's share of it) / a step of the CNN, with JSON lines; others are conditions."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    torch.manual_seed(0)
    step_s = _step_s(rounds)
    conditions: dict[str, Any] = {
        **common.machine_conditions(),
        "model": "cnn",
        "step_cpu_s": step_s,
        "interval_s": INTERVAL_S,
        "value": "(CPU time of a look + of a sample x step / interval) / CPU time of a step",
    }
    with tempfile.TemporaryDirectory() as folder:
        looks, samples = _costs(Path(folder), rounds)
    figures = {}
    for name, sample in samples.items():
        cost = [
            look / step_s + max(s, 0.0) / INTERVAL_S for look, s in zip(looks, sample, strict=True)
        ]
        figures[name] = intervals.median_ratio(cost, [1.0] * len(cost))
        conditions[name] = {
            "look_s": intervals.median(looks),
            "sample_s": intervals.median(sample),
            **common.interval_dict(figures[name]),
        }
    found = figures["JsonLines"]
    yield common.Figure(
        IDS[0], "fraction", found.value, found.low, found.high, WITHOUT, rounds, conditions
    )


def _step_s(rounds: int) -> float:
    sizer = brimful.BatchSizer(overhead.Cnn(), local=True)
    batch = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    step = _stepping(sizer, batch)
    step()
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return intervals.median(seconds)


def _stepping(sizer: brimful.BatchSizer, batch: Any) -> Callable[[], None]:
    def step() -> None:
        sizer.step(batch, lambda m, p: torch.nn.functional.cross_entropy(m(p[0]), p[1]))
        sizer._model.zero_grad()  # type: ignore[union-attr]

    return step


def _exporters(folder: Path) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {
        "JsonLines": lambda: JsonLines(folder / "lines"),
        "Prometheus": lambda: Prometheus(0, textfile=folder / "brimful.prom"),
        "TensorBoard": lambda: TensorBoard(folder / "events"),
        "OpenTelemetry": OpenTelemetry,
    }
    return made


def _costs(folder: Path, rounds: int) -> tuple[list[float], dict[str, list[float]]]:
    """CPU seconds of a look between samples, and of a sample by exporter, the process's threads included; by round."""
    model = torch.nn.Linear(8, 4)
    batch = torch.randn(4, 8), torch.randint(4, (4,))
    ways: dict[str, Any] = {WITHOUT: None}
    for name, make in _exporters(folder).items():
        try:
            ways[name] = make()
        except ModuleNotFoundError:
            continue
    sizers = {name: brimful.BatchSizer(model, local=True) for name in [*ways, "look"]}
    looking = Metrics(sizer=sizers["look"], to=[], interval_s=1e9)
    running = {
        name: Metrics(sizer=sizers[name], to=[exporter], interval_s=0)
        for name, exporter in ways.items()
        if exporter is not None
    }
    seconds: dict[str, list[float]] = {name: [] for name in sizers}
    for number in range(-2, rounds):
        for name in reversed(sizers) if number % 2 else sizers:
            step = _stepping(sizers[name], batch)
            began = time.process_time()
            for _ in range(STEPS):
                step()
            while name in running and not running[name]._queue.empty():
                time.sleep(1e-4)
            if number >= 0:
                seconds[name].append((time.process_time() - began) / STEPS)
    for metrics in (looking, *running.values()):
        metrics.close()
    without = seconds.pop(WITHOUT)
    above = {
        name: [a - b for a, b in zip(of_name, without, strict=True)]
        for name, of_name in seconds.items()
    }
    del above["look"]
    return _looks(looking, rounds), above


def _looks(metrics: Metrics, rounds: int) -> list[float]:
    """The call behind a step, by itself: its few hundred nanoseconds are lost in the noise of whole steps."""
    calls, found = 1000, []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(calls):
            metrics._after_step(None)
        found.append((time.process_time() - began) / calls)
    return found
