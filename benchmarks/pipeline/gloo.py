"""What an action costs between two processes over gloo: 1F1B of two Linear(64, 64), one row a microbatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks import common, intervals, ranks

SIZE, MICROBATCHES = 64, 32
#: A rank's forwards and backwards, and its sends and receives.
ACTIONS = 4 * MICROBATCHES
ROUNDS, QUICK_ROUNDS = 60, 3
WARM_UP_STEPS = 5
STEPS = 3  # of each way in a round
STALL_S = 120.0
PEER = "torch.distributed.pipelining, 1F1B, two processes over gloo"


def figures(quick: bool) -> Iterator[common.Figure]:
    """Yields the CPU time of both processes over torch's; wall time stands beside it."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    conditions = common.machine_conditions()
    conditions.update(size=SIZE, rows=1, microbatches=MICROBATCHES, actions_of_a_rank=ACTIONS)
    try:
        measured = ranks.run_ranks(2, _measure, rounds, stall_s=STALL_S)
    except ranks.RanksFailed as error:
        yield common.unmeasured("pipeline.action_gloo", str(error), conditions=conditions)
        return
    cpu, wall = {}, {}
    for name in ("brimful", "torch"):
        pairs = list(zip(*(times[name] for times, _ in measured), strict=True))
        cpu[name] = [sum(c for c, _ in pair) for pair in pairs]
        wall[name] = [max(w for _, w in pair) for pair in pairs]
    conditions["us_per_action"] = {
        name: {
            "cpu": intervals.median(cpu[name]) / (2 * ACTIONS) * 1e6,
            "wall": intervals.median(wall[name]) / ACTIONS * 1e6,
        }
        for name in cpu
    }
    conditions["wall_ratio"] = common.interval_dict(
        intervals.median_ratio(wall["brimful"], wall["torch"])
    )
    conditions["verdict_messages_a_step"] = sum(sent for _, sent in measured)
    print(f"\npipeline.action_gloo: {conditions['us_per_action']}")
    ratio = intervals.median_ratio(cpu["brimful"], cpu["torch"])
    yield common.Figure(
        "pipeline.action_gloo",
        "ratio",
        ratio.value,
        ratio.low,
        ratio.high,
        PEER,
        rounds=rounds,
        conditions=conditions,
    )


def _measure(
    rank: int, world_size: int, progress: Callable[[], None], rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Returns CPU and wall time of a step in each round, and the verdicts that this rank sends in one of ours."""
    ours, sent = _ours()
    ways = {"brimful": ours, "torch": _torchs(rank, world_size)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name in sorted(ways, reverse=number % 2 == 0):
            torch.distributed.barrier()
            began = time.process_time(), time.perf_counter()
            for _ in range(STEPS if number >= 0 else WARM_UP_STEPS):
                ways[name]()
            if number >= 0:
                taken = time.process_time() - began[0], time.perf_counter() - began[1]
                found[name].append((taken[0] / STEPS, taken[1] / STEPS))
        if number < 0:
            before = sent()
        progress()
    return found, (sent() - before) / (rounds * STEPS)


def _ours() -> tuple[Callable[[], object], Callable[[], int]]:
    import brimful

    stage = nn.Linear(SIZE, SIZE)
    pipe = brimful.Pipeline(
        [stage],
        microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        group=torch.distributed.group.WORLD,
    )
    x, y = torch.randn(MICROBATCHES, SIZE), torch.randn(MICROBATCHES, SIZE)

    def step() -> None:
        pipe.step(x, y)
        stage.zero_grad()

    return step, lambda: pipe._core.messages


def _torchs(rank: int, world_size: int) -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(nn.Linear(SIZE, SIZE), rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(MICROBATCHES, SIZE), torch.randn(MICROBATCHES, SIZE)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        stage.submod.zero_grad()

    return step
