"""Until the first good step under a budget: what others that find a size take, and what their gradient is worth."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import common
from benchmarks.sizer import mem_tracker, models, predict

IDS = ("sizer.peers",)
SHARE = 0.6  # of what the unsplit step takes
MODELS = ("MLP", "conv + BN", "U-Net", "encoder", "LSTM")
QUICK_MODELS = ("MLP",)
OURS, HALVING = "predict=True", "halving microbatcher"
TRACED = (1, 2, 4, 8, 16)


@dataclass
class Job:
    """A batch, and the room that a step may take."""

    case: models.Case
    model: torch.nn.Module
    batch: torch.Tensor
    room: int

    def forward_backward(self, begin: int, end: int) -> None:
        share = (end - begin) / len(self.batch)
        (models.loss(self.model, self.batch[begin:end]) * share).backward()


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields our seconds to the first good step to those of the halving microbatcher, the worst model's."""
    names = QUICK_MODELS if quick else MODELS
    found = {name: _compare(models.CASES[name]) for name in names}
    conditions = common.machine_conditions()
    conditions.update(budget_share=SHARE, models=found)
    if importlib.util.find_spec("accelerate") is None:
        conditions["accelerate"] = "not installed: pip install accelerate"
    print(f"\nsizer.peers: the first good step at {SHARE:.0%} of the unsplit peak")
    print(f"  {'':14s} {'':22s} {'restarts':>8s} {'OOMs':>5s} {'s':>8s} {'used':>6s} {'error':>9s}")
    for name, ways in found.items():
        for way, row in ways.items():
            if "reason" in row:
                print(f"  {name:14s} {way:22s} {row['reason']}")
                continue
            print(
                f"  {name:14s} {way:22s} {row['restarts']:8d} {row['ooms']:5d} "
                f"{row['seconds']:8.3f} {row['budget_used']:6.1%} {row['gradient_error']:9.1e}"
            )
    ratio = max(ways[OURS]["seconds"] / ways[HALVING]["seconds"] for ways in found.values())
    yield common.Figure(
        IDS[0], "ratio", ratio, ratio, ratio, HALVING, rounds=1, conditions=conditions
    )


def _compare(case: models.Case) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    model = case.make()
    batch = case.batch(case.rows)
    whole = Job(case, model, batch, 0)
    for _ in range(2):  # what is made once is made in the first
        peak = _peak_of(lambda: whole.forward_backward(0, len(batch)))
        expected = _take_gradients(model)
    job = Job(case, model, batch, int(SHARE * peak))
    ways: dict[str, Callable[[Job], int]] = {
        OURS: lambda job: _sizer(job, True),
        "predict=False": lambda job: _sizer(job, False),
        HALVING: lambda job: _halving(job, len(job.batch)),
        "log-log fit": lambda job: _halving(job, _log_log_rows(job)),
        "MemTracker": lambda job: _halving(job, _mem_tracker_rows(job)),
        "accelerate": _accelerate,
    }
    return {way: _first_step(job, find, expected) for way, find in ways.items()}


def _first_step(
    job: Job, find: Callable[[Job], int], expected: list[torch.Tensor]
) -> dict[str, Any]:
    import brimful

    torch.manual_seed(1)
    gc.collect()
    before = brimful.memory.stats("cpu")
    brimful.memory.set_limit("cpu", before.used_bytes + job.room)
    brimful.memory.reset_peak("cpu")
    began = time.perf_counter()
    try:
        restarts = find(job)
    except Exception as error:
        job.model.zero_grad()
        return {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    finally:
        brimful.memory.set_limit("cpu", None)
    seconds = time.perf_counter() - began
    after = brimful.memory.stats("cpu")
    return {
        "restarts": restarts,
        "ooms": after.ooms - before.ooms,
        "seconds": seconds,
        "budget_used": (after.peak_bytes - before.used_bytes) / job.room,
        "gradient_error": _error(_take_gradients(job.model), expected),
    }


def _sizer(job: Job, predicts: bool) -> int:
    import brimful

    outcome = brimful.BatchSizer(job.model, predict=predicts).step(job.batch, models.loss)
    return int(outcome.retries)


def _halving(job: Job, rows: int) -> int:
    """Pieces of `rows` rows, half as many whenever memory runs out, from the batch's beginning."""
    restarts = 0
    while True:
        try:
            for begin in range(0, len(job.batch), rows):
                job.forward_backward(begin, min(begin + rows, len(job.batch)))
            return restarts
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        job.model.zero_grad()
        gc.collect()
        rows = (rows + 1) // 2
        restarts += 1


def _log_log_rows(job: Job) -> int:
    def step(rows: int) -> None:
        job.forward_backward(0, rows)
        job.model.zero_grad()

    peaks = {rows: _peak_of(lambda rows=rows: step(rows)) for rows in TRACED}  # type: ignore[misc]
    return _most(lambda rows: predict.log_log(peaks, rows), job)


def _mem_tracker_rows(job: Job) -> int:
    return _most(lambda rows: mem_tracker.peak_bytes(job.case, rows), job)


def _most(told: Callable[[int], float], job: Job) -> int:
    fits, too_many = 1, len(job.batch) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if told(middle) <= job.room:
            fits = middle
        else:
            too_many = middle
    return fits


def _accelerate(job: Job) -> int:
    """Its finder starts anew with a smaller batch: the step that succeeds is one of another batch."""
    try:
        from accelerate.utils.memory import find_executable_batch_size
    except ImportError as error:
        raise RuntimeError(f"{error}; pip install accelerate") from None
    calls = 0

    @find_executable_batch_size(starting_batch_size=len(job.batch))
    def step(batch_size: int) -> None:
        nonlocal calls
        calls += 1
        job.model.zero_grad()
        models.loss(job.model, job.batch[:batch_size]).backward()

    step()
    return calls - 1


def _peak_of(work: Callable[[], None]) -> int:
    import brimful
    from brimful import _C

    gc.collect()
    before = brimful.memory.stats("cpu").used_bytes
    with _C._PeakScope("cpu") as scope:
        work()
    return int(scope.peak_bytes - before)


def _take_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def _error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference, relative to the largest element of the gradient."""
    differences = [(a - b).abs().max() for a, b in zip(found, expected, strict=True)]
    return float(max(differences) / max(b.abs().max() for b in expected))
