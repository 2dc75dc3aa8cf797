"""Memory that runs out at every allocation of a step on either of two ranks, or on both at once."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common, ranks
from benchmarks.sizer import models, sweep, trials

IDS = ("sizer.sweep_ranks_bad",)
WORLD_SIZE = 2
FAILING = ((0,), (1,), (0, 1))
QUICK_MODELS = ("MLP", "conv + BN", "ragged decoder")
QUICK_FAULTS = 3  # of each phase of each model and set of failing ranks
STALL_S = 60.0


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the trials in which a rank did not end as it must."""
    names = QUICK_MODELS if quick else tuple(models.CASES)
    most = QUICK_FAULTS if quick else None
    try:
        by_rank = ranks.run_ranks(WORLD_SIZE, sweep_rank, names, most, stall_s=STALL_S)
    except ranks.RanksFailed as error:
        yield common.unmeasured(IDS[0], str(error), conditions=common.machine_conditions())
        return
    found = by_rank[0]
    for name, of_model in by_rank[1].items():
        found[name].bad += of_model.bad
    figure = sweep.figure_of(IDS[0], found)
    figure.conditions.update(world_size=WORLD_SIZE, backend="gloo", failing_ranks=FAILING)
    yield figure


def sweep_rank(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    names: tuple[str, ...],
    most: int | None,
) -> dict[str, sweep.Found]:
    """One rank's part: the same trials on all ranks, what was bad on this one."""
    import brimful

    found = {}
    for name in names:
        subject = trials.Subject(
            models.CASES[name],
            lambda m: brimful.DistributedDataParallel(m, plan="registration"),
            rank,
        )
        began = time.monotonic()
        with trials.quick_collections():  # without what the first steps have imported
            found[name] = _sweep_model(subject, rank, progress, most)
        if rank == 0:
            faults = sum(found[name].faults.values())
            print(f"  {name}: {faults} faults in {time.monotonic() - began:.0f} s", flush=True)
    return found


def _sweep_model(
    subject: trials.Subject, rank: int, progress: Callable[[], None], most: int | None
) -> sweep.Found:
    found = sweep.Found()
    plain = subject.run(is_clean=True)
    counts = _gather(plain.seen)
    clean: dict[Any, trials.Result] = {}
    for phase in (trials.WORK, trials.OPTIMIZER):
        chosen = trials.indices(max(count[phase] for count in counts), most)
        found.faults[phase] = len(chosen) * len(FAILING)
        for index in chosen:
            for failing in FAILING:
                words = _trial(subject, rank, phase, index, failing, clean, plain, found)
                if words is not None:
                    found.bad.append(
                        f"{phase} at allocation {index} of ranks {failing}, rank {rank}: {words}"
                    )
                progress()
    return found


def _trial(
    subject: trials.Subject,
    rank: int,
    phase: str,
    index: int,
    failing: tuple[int, ...],
    clean: dict[Any, trials.Result],
    plain: trials.Result,
    found: sweep.Found,
) -> str | None:
    mine = rank in failing and index < plain.seen[phase]
    others = [other for other in failing if other != rank]
    in_optimizer = phase == trials.OPTIMIZER
    met = _gather(mine)
    hears_of = others[0] if in_optimizer and not mine and others and met[others[0]] else None
    result = subject.run(fault=(phase, index) if mine else None, hears_of=hears_of)
    found.retried += result.retries > 0
    everybody = _gather((result.split, result.error, _fingerprint(result.values)))
    if in_optimizer and any(met):
        return sweep.judge_optimizer(result, plain) if mine else result.error
    errors = [error for _, error, _ in everybody]
    if any(error is not None for error in errors):
        return result.error  # the other rank reports its own
    splits = tuple(tuple(split or ()) for split, _, _ in everybody)
    if splits not in clean:
        clean[splits] = subject.run(split=result.split, is_clean=True)
    if mine and not result.fired:
        return "the fault was not met"
    if len({prints for _, _, prints in everybody}) > 1:
        return "the replicas differ"
    return result.differs_from(clean[splits])


_calls = 0


def _gather(mine: Any) -> list[Any]:
    """Over the store: a collective's tensors would be in use for a moment longer."""
    global _calls
    _calls += 1
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{_calls}/{dist.get_rank()}", pickle.dumps(mine))
    return [pickle.loads(store.get(f"{_calls}/{rank}")) for rank in range(WORLD_SIZE)]


def _fingerprint(values: list[torch.Tensor]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for value in values:
        total.update(trials.bytes_of(value))
    return total.hexdigest()
