"""A fault at every operator of a step, on each rank: wrong gradients, errors and bytes that are left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import common, ranks

IDS = ("sharded.bad",)
STALL_S = 120.0
CLOSE, CLOSE_IN_HALF = 1e-6, 2e-2
#: By name: ranks, and how the model is made.
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "parameters kept after forward": (2, {"reshard": False}),
    "activation checkpointing": (2, {"recompute": True}),
    "prefetch by hand": (2, {"prefetch": True}),
    "bfloat16": (2, {"half": True}),
    "4 ranks": (4, {}),
    "2 x 2, shards and replicas": (4, {"replicas": True}),
    "tensor parallel": (2, {"tensor": 2}),
    "2 x 2, shards and tensor parallel": (4, {"tensor": 2}),
}
QUICK = ("2 ranks", "tensor parallel")


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields how many of the faults ended otherwise than in the gradients of a step without any."""
    found: dict[str, Any] = {}
    bad = 0
    every = 29 if quick else 1
    for name in QUICK if quick else CONFIGURATIONS:
        size, how = CONFIGURATIONS[name]
        try:
            tallies = ranks.run_ranks(size, _rank, how, every, stall_s=STALL_S)
        except ranks.RanksFailed as error:
            yield common.unmeasured(IDS[0], f"{name}: {error}", conditions=found)
            return
        found[name] = {key: max(t[key] for t in tallies) for key in tallies[0]}
        bad += found[name]["bad"] + found[name]["bytes_left"]
        print(f"sharded.bad: {name}: {found[name]}", flush=True)
    conditions = {**common.machine_conditions(), "configurations": found}
    yield common.Figure(IDS[0], "count", bad, bad, bad, rounds=1, conditions=conditions)


def _rank(
    rank: int, world_size: int, progress: Callable[[], None], how: dict[str, Any], every: int
) -> dict[str, Any]:
    from models import used
    from rank_processes import Rank
    from sharded_models import Fault, Trial, worst
    from tensor_models import parallel, word_loss, words_of
    from torch.distributed.device_mesh import init_device_mesh

    how = dict(how)
    if halves := how.pop("tensor", 0):
        names = ("data", "tensor")
        mesh = init_device_mesh("cpu", (world_size // halves, halves), mesh_dim_names=names)
        mesh = mesh if world_size > halves else mesh["tensor"]
        batch = words_of(4, rank // halves)
        how.update(model=parallel(mesh=mesh), batch=batch, loss=word_loss)
    if how.pop("replicas", False):
        names = ("replicas", "shards")
        how["mesh"] = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    trial = Trial(Rank(rank, world_size), rows=(4,) * world_size, **how)
    close = CLOSE_IN_HALF if how.get("half") else CLOSE
    draw = random.Random(0)
    places = [
        {failing: at} for failing in range(world_size) for at in range(0, trial.places, every)
    ]
    # Two ranks at different places of one step.
    places += [
        {0: draw.randrange(trial.places), world_size - 1: draw.randrange(trial.places)}
        for _ in range(len(places) // 4)
    ]
    bad, distance, before, left = 0, 0.0, 0, 0
    for number, at in enumerate(places):
        progress()
        trial.begin()
        with Fault(at.get(rank, -1)):
            outcome = trial.step()
        found = worst(trial.result(), trial.expected)
        distance = max(distance, found)
        bad += found > close or outcome.split != [2, 2]
        if number % 50 == 0:
            trial.begin()
            now = used()
            before = before or now
            left = max(left, now - before)
    return {
        "places": len(places),
        "bad": bad,
        "worst": distance,
        "drained": trial.sizer._sharded.drained,
        "collectives": trial.sizer._sharded.collectives,
        "bytes_left": left,
    }
