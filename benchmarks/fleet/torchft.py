"""The same job under torchft's own wrapper: rows that are kept, attempts that are thrown away, time a step."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, intervals

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path += [str(TESTS / "python"), str(TESTS / "integrations")]

import fleet_ranks  # noqa: E402

IDS = ("fleet.torchft",)
SIZE, ROUNDS, QUICK_ROUNDS, KILLS = 3, 6, 2, 3
STEPS_AN_EPOCH, EPOCHS, QUICK_EPOCHS = 4, 15, 3
DIES = ("piece0", 5)


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the time of a step over that of torchft's own, rounds in turn; what a kill costs each is a condition."""
    try:
        from benchmarks.fleet import torchft_programs
    except ModuleNotFoundError as missing:
        reason = f"{missing.name} is not installed (make test-slow makes .venv-integrations, which has it)"
        yield common.unmeasured(IDS[0], reason, conditions=common.machine_conditions())
        return
    epochs = QUICK_EPOCHS if quick else EPOCHS
    kinds = {"brimful": torchft_programs.Ours, "torchft": torchft_programs.Theirs}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for name, kind in kinds.items():
            times[name].append(statistics.median(_run(kind, epochs)["step_s"]))
    conditions: dict[str, Any] = {
        **common.machine_conditions(),
        "backend": "gloo",
        "replicas": SIZE,
        "rows a step": fleet_ranks.BATCH,
        **{f"{name}, ms a step": 1e3 * statistics.median(s) for name, s in times.items()},
    }
    for name, kind in kinds.items():
        runs = [_run(kind, epochs, DIES) for _ in range(KILLS)]
        conditions[f"{name}, one killed"] = {
            key: [run[key] for run in runs] for key in ("rows kept", "thrown away", "ended")
        }
    found = intervals.median_ratio(times["brimful"], times["torchft"])
    yield common.Figure(
        IDS[0],
        "ratio",
        found.value,
        found.low,
        found.high,
        peer="torchft's DistributedDataParallel",
        rounds=len(times["brimful"]),
        conditions=conditions,
    )


def _run(kind: type, epochs: int, dies: tuple[str, int] | None = None) -> dict[str, Any]:
    from torchft_replicas import lighthouse_server

    lighthouse = lighthouse_server()
    rows = STEPS_AN_EPOCH * fleet_ranks.BATCH
    try:
        with fleet_ranks.Ranks(kind) as replicas:
            replicas.store.set("lighthouse", lighthouse.address())
            for index in range(SIZE):
                own = dies if index == 1 else None
                replicas.start(
                    fleet_ranks.Plan(dies=own, rows=rows, epochs=epochs, dtype=torch.float32)
                )
            answers = [result for how, result in replicas.answers(120) if how == "ended"]
            written = [replicas.lines(index) for index in range(SIZE)]
    finally:
        lighthouse.shutdown()
    kept, attempts, stood = 0, 0, 0
    for index, lines in enumerate(written):
        survived = dies is None or index != 1
        handed = 0
        for line in lines:
            if line[0] == "h":
                handed = len(line) - 3
                attempts += survived
            elif line[0] == "s":
                kept += handed
                stood += survived
    steps = epochs * STEPS_AN_EPOCH
    return {
        "step_s": [s for answer in answers for s in answer["step_s"][5:]],
        "rows kept": round(kept / (steps * fleet_ranks.BATCH), 4),
        "thrown away": attempts - stood,  # steps of replicas that live
        "ended": len(answers),
    }
