"""Memory that runs out at every allocation of a step on each rung, on one rank and on two; what differs afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import common, ranks
from benchmarks.ladder import cases, plans
from benchmarks.sizer import models, sweep, sweep_ranks, trials

IDS = ("ladder.sweep_bad",)
#: Swept at every allocation; of the others some, spread over the step.
EVERY = ("conv + BN", "encoder", "LSTM", "embeddings", "checkpointed", "in-place ReLU")
SOME_FAULTS = 8  # of each rung
RANKS_MODELS = {"embeddings": None, "conv + BN": SOME_FAULTS, "LSTM": SOME_FAULTS}
QUICK_MODELS = ("MLP",)
QUICK_FAULTS = 4
STALL_S = 60.0
RUNGS = {"everything": "everything", "recompute": "parts recomputed", "offload": "leaves offloaded"}


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the trials that did not end as they must, of one rank and of two."""
    found: dict[str, sweep.Found] = {}
    with plans.quiet():
        for name in QUICK_MODELS if quick else cases.CASES:
            began = time.monotonic()
            most = None if name in EVERY else SOME_FAULTS
            of_model = _sweep(name, QUICK_FAULTS if quick else most)
            found.update(of_model)
            bad = [words for of_rung in of_model.values() for words in of_rung.bad]
            print(f"  {name}: {time.monotonic() - began:.0f} s, bad: {bad[:2]}", flush=True)
    of_ranks = dict.fromkeys(QUICK_MODELS, QUICK_FAULTS) if quick else RANKS_MODELS
    try:
        by_rank = ranks.run_ranks(sweep_ranks.WORLD_SIZE, sweep_rank, of_ranks, stall_s=STALL_S)
    except ranks.RanksFailed as error:
        yield common.unmeasured(IDS[0], str(error), conditions=common.machine_conditions())
        return
    for name, of_model in by_rank[1].items():
        by_rank[0][name].bad += of_model.bad
    figure = sweep.figure_of(IDS[0], {**found, **by_rank[0]})
    figure.conditions.update(
        failing_ranks=sweep_ranks.FAILING,
        rows=cases.ROWS,
        every_allocation=EVERY,
        two_ranks=of_ranks,
        others_faults_a_rung=SOME_FAULTS,
    )
    yield figure


class Rung:
    """A subject whose steps run row by row, by one plan; with its clean step."""

    def __init__(self, name: str, rank: int | None = None) -> None:
        import brimful
        from brimful._modules import unwrapped

        wrap = None if rank is None else brimful.DistributedDataParallel
        case = cases.CASES[name]
        rows = cases.ROWS + (rank or 0)
        small = models.Case(case.make, lambda _: case.draw(rows, case.small), rows)
        self.subject = trials.Subject(small, wrap, rank or 0, ladder="auto")
        self.split = [1] * len(self.subject.batch)
        inner = unwrapped(self.subject.model)
        _, modules = plans.recorded(inner, self.subject.batch, trials.noisy_loss)
        chosen = plans.sample(modules, 0)
        self.plans = {
            rung: plans.named(modules, chosen[plan])
            for rung, plan in RUNGS.items()
            if plan in chosen
        }
        self.subject._reset()
        self.start_rng = trials.rng_states()

    def begin(self, rung: str) -> trials.Result:
        self.subject.rungs = self.plans[rung]
        self.everything = self.plans[rung].everything
        for _ in range(2):
            clean = self.run(is_clean=True)
        return clean

    def run(self, index: int | None = None, is_clean: bool = False) -> trials.Result:
        fault = None if index is None else (trials.WORK, index)
        return self.subject.run(fault=fault, split=self.split, is_clean=is_clean)

    def judge(self, result: trials.Result, clean: trials.Result) -> str | None:
        """What is wrong about a step with a fault, or None. Where all is offloaded there is nothing left to try."""
        if any("forward" in vars(module) for module in self.subject.model.modules()):
            return "a module's forward was not put back"
        if result.error is None:
            return result.differs_from(clean)
        if not self.everything:
            return result.error
        if result.rng != self.start_rng:
            return f"random numbers differ from the start ({result.error})"
        if not trials.same_bits(result.values, self.subject.start):
            return f"parameters or buffers differ from the start ({result.error})"
        return f"{result.left_bytes} bytes left over" if result.left_bytes else None


def _sweep(name: str, most: int | None) -> dict[str, sweep.Found]:
    subject = Rung(name)
    for rung in subject.plans:  # what is imported and made once
        subject.begin(rung)
    with trials.quick_collections():
        return {f"{name}, {rung}": _sweep_rung(subject, rung, most) for rung in subject.plans}


def _sweep_rung(subject: Rung, rung: str, most: int | None) -> sweep.Found:
    found = sweep.Found()
    clean = subject.begin(rung)
    if clean.error is not None or clean.retries or clean.left_bytes:
        found.bad.append(f"a clean step: {clean.error}, {clean.left_bytes} bytes left over")
    chosen = trials.indices(clean.seen[trials.WORK], most)
    found.faults[rung] = len(chosen)
    for index in chosen:
        result = subject.run(index)
        found.retried += result.retries > 0
        words = subject.judge(result, clean) if result.fired else "the fault was not met"
        if words is not None:
            found.bad.append(f"at allocation {index}: {words}")
    return found


def sweep_rank(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    of_models: dict[str, int | None],
) -> dict[str, sweep.Found]:
    """One rank's part: the same trials on all ranks, what was bad on this one."""
    found: dict[str, sweep.Found] = {}
    with plans.quiet():
        for name, most in of_models.items():
            began = time.monotonic()
            subject = Rung(name, rank)
            for rung in subject.plans:  # on both ranks
                subject.begin(rung)
            with trials.quick_collections():
                for rung in subject.plans:
                    key = f"{name}, {rung}, two ranks"
                    found[key] = _sweep_ranks(subject, rung, rank, progress, most)
            if rank == 0:
                print(f"  {name}, two ranks: {time.monotonic() - began:.0f} s", flush=True)
    return found


def _sweep_ranks(
    subject: Rung, rung: str, rank: int, progress: Callable[[], None], most: int | None
) -> sweep.Found:
    found = sweep.Found()
    clean = subject.begin(rung)
    seen = sweep_ranks._gather(clean.seen[trials.WORK])
    chosen = trials.indices(max(seen), most)
    found.faults[rung] = len(chosen) * len(sweep_ranks.FAILING)
    for index in chosen:
        for failing in sweep_ranks.FAILING:
            mine = rank in failing and index < clean.seen[trials.WORK]
            result = subject.run(index if mine else None)
            found.retried += result.retries > 0
            words = _judge_rank(subject, result, clean, mine)
            if words is not None:
                found.bad.append(f"at allocation {index} of ranks {failing}, rank {rank}: {words}")
            progress()
    return found


def _judge_rank(
    subject: Rung, result: trials.Result, clean: trials.Result, mine: bool
) -> str | None:
    everybody: list[Any] = sweep_ranks._gather(
        (result.error, sweep_ranks._fingerprint(result.values))
    )
    if mine and not result.fired:
        return "the fault was not met"
    if len({error is None for error, _ in everybody}) > 1:
        return f"the step stood on one rank alone ({[error for error, _ in everybody]})"
    if len({values for _, values in everybody}) > 1:
        return "the replicas differ"
    return subject.judge(result, clean)
