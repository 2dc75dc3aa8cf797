"""What an action costs where its stage has next to nothing to do: Linear(64, 64), one row, two stages, one process."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import common, intervals
from benchmarks.pipeline import program

SIZE, MICROBATCHES = 64, 32
ACTIONS = 4 * MICROBATCHES  # forward and backward in two stages
ROUNDS, QUICK_ROUNDS = 60, 3
STEPS = 5  # of each way in a round; its median is taken
WARM_UP_STEPS = 5
PEER = "torch.distributed.pipelining, Interleaved1F1B, both stages on one rank"


def figures(quick: bool) -> Iterator[common.Figure]:
    """Yields wall time of a step over torch's, from C++ and from Python, and the trace's share of CPU time."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    wall: dict[str, list[float]] = {name: [] for name in ("python", "torch", "cpp")}
    cpu: dict[str, list[float]] = {name: [] for name in wall}
    traced: dict[bool, list[float]] = {True: [], False: []}
    missing = None
    with tempfile.TemporaryDirectory() as folder:
        ways = {"python": _ours(), "torch": _torchs(folder)}
        for number in range(rounds):
            order = [("python", "torch", "cpp"), ("cpp", "torch", "python")][number % 2]
            for name in order[number // 2 % 3 :] + order[: number // 2 % 3]:  # each first in turn
                if name != "cpp":
                    _time(ways[name], wall[name], cpu[name])
                elif missing is None:
                    try:
                        lines = program.run("actions", 40 * STEPS)
                    except program.Unavailable as error:
                        missing = str(error)
                        continue
                    for trace, seconds in traced.items():
                        seconds.append(_median_s(lines, "cpu_us", trace))
                    wall["cpp"].append(_median_s(lines, "wall_us", True))
                    cpu["cpp"].append(traced[True][-1])
        torch.distributed.destroy_process_group()
    conditions = common.machine_conditions()
    conditions.update(size=SIZE, rows=1, microbatches=MICROBATCHES, actions=ACTIONS)
    conditions["us_per_action"] = {
        name: {
            "wall": intervals.median(wall[name]) / ACTIONS * 1e6,
            "cpu": intervals.median(cpu[name]) / ACTIONS * 1e6,
        }
        for name in wall
        if wall[name]
    }
    print(f"\npipeline.action: microseconds per compute action: {conditions['us_per_action']}")
    for figure_id, name in (("pipeline.action_cpp", "cpp"), ("pipeline.action_python", "python")):
        if missing and name == "cpp":
            yield common.unmeasured(figure_id, missing, conditions=conditions)
            continue
        yield _figure(figure_id, wall[name], wall["torch"], cpu[name], cpu["torch"], conditions)
    if missing:
        yield common.unmeasured("pipeline.trace", missing, conditions=conditions)
        return
    above = intervals.median_ratio(traced[True], traced[False])
    yield common.Figure(
        "pipeline.trace",
        "fraction",
        above.value - 1,
        above.low - 1,
        above.high - 1,
        "without a trace",
        rounds=rounds,
        conditions={
            **conditions,
            "what": "CPU time of a step of the C++ pipeline, spinning included",
        },
    )


def _median_s(lines: list[dict[str, Any]], name: str, trace: bool) -> float:
    return statistics.median(line[name] for line in lines if line["trace"] == trace) / 1e6


def _figure(
    figure_id: str,
    wall: list[float],
    peer_wall: list[float],
    cpu: list[float],
    peer_cpu: list[float],
    conditions: dict[str, Any],
) -> common.Figure:
    ratio = intervals.median_ratio(wall, peer_wall)
    beside = common.interval_dict(intervals.median_ratio(cpu, peer_cpu))
    return common.Figure(
        figure_id,
        "ratio",
        ratio.value,
        ratio.low,
        ratio.high,
        PEER,
        rounds=len(wall),
        conditions={**conditions, "cpu_ratio_spinning_included": beside},
    )


def _time(step: Callable[[], object], wall: list[float], cpu: list[float]) -> None:
    walls, cpus = [], []
    for _ in range(STEPS):
        began = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - began[0])
        cpus.append(time.process_time() - began[1])
    wall.append(statistics.median(walls))
    cpu.append(statistics.median(cpus))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(MICROBATCHES, SIZE), torch.randn(MICROBATCHES, SIZE)


def _ours() -> Callable[[], object]:
    import brimful

    stages = [nn.Linear(SIZE, SIZE) for _ in range(2)]
    pipe = brimful.Pipeline(
        stages, microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss, threads_per_rank=1
    )
    x, y = _data()

    def step() -> None:
        pipe.step(x, y)
        for stage in stages:
            stage.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    return step


def _torchs(folder: str) -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(os.path.join(folder, "store"), 1),
        rank=0,
        world_size=1,
    )
    stages = [
        PipelineStage(nn.Linear(SIZE, SIZE), index, 2, torch.device("cpu")) for index in range(2)
    ]
    schedule = ScheduleInterleaved1F1B(
        stages, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    x, y = _data()

    def step() -> None:
        schedule.step(x, target=y)
        for stage in stages:
            stage.submod.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    return step
