"""Memory that runs out at every allocation of a step, one after the other: what is not as if it had not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks import common
from benchmarks.sizer import models, trials

IDS = ("sizer.sweep_bad",)
QUICK_FAULTS = 6  # of each phase of each model
BUDGETS, QUICK_BUDGETS = 24, 4
SLACK_BYTES = 16384  # what a step takes beside its pieces and its optimizer
SHOWN = 20


@dataclass
class Found:
    """Of one model."""

    faults: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    fitted: int = 0  # limits that were enough
    bad: list[str] = field(default_factory=list)


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the trials that did not end as they must."""
    found: dict[str, Found] = {}
    with trials.quick_collections():
        for name, case in models.CASES.items():
            found[name] = sweep(case, QUICK_FAULTS if quick else None)
            sweep_budgets(case, QUICK_BUDGETS if quick else BUDGETS, found[name])
            print(f"  {name:15s} {found[name].faults}, bad: {len(found[name].bad)}")
    yield figure_of(IDS[0], found)


def figure_of(figure_id: str, found: dict[str, Found]) -> common.Figure:
    """Returns the figure with what was swept beside it."""
    bad = [f"{name}: {words}" for name, of_model in found.items() for words in of_model.bad]
    swept = sum(sum(of_model.faults.values()) for of_model in found.values())
    conditions: dict[str, Any] = common.machine_conditions()
    conditions.update(
        faults=swept,
        models={
            name: {**f.faults, "retried": f.retried, "fitted": f.fitted}
            for name, f in found.items()
        },
        bad=bad[:SHOWN],
    )
    print(f"\n{figure_id}: {len(bad)} of {swept} faults ended badly")
    for words in bad[:SHOWN]:
        print(f"  {words}")
    return common.Figure(
        figure_id, "count", len(bad), len(bad), len(bad), rounds=swept, conditions=conditions
    )


def sweep(case: models.Case, most: int | None) -> Found:
    """Plants a fault at each allocation of a step, or at `most` of each phase."""
    found = Found()
    subject = trials.Subject(case)
    plain = subject.run(is_clean=True)
    clean = {tuple(plain.split or ()): plain}
    if plain.error is not None or plain.left_bytes != 0:
        found.bad.append(f"a clean step: {plain.error}, {plain.left_bytes} bytes left over")
    for phase in (trials.WORK, trials.OPTIMIZER):
        chosen = trials.indices(plain.seen[phase], most)
        found.faults[phase] = len(chosen)
        for index in chosen:
            result = subject.run(fault=(phase, index))
            found.retried += result.retries > 0
            words = (
                _judge_work(subject, result, clean)
                if phase == trials.WORK
                else judge_optimizer(result, plain)
            )
            if words is not None:
                found.bad.append(f"{phase} at allocation {index}: {words}")
    return found


def _judge_work(
    subject: trials.Subject, result: trials.Result, clean: dict[tuple[int, ...], trials.Result]
) -> str | None:
    if not result.fired:
        return "the fault was not met"
    return _judge(subject, result, clean)


def _judge(
    subject: trials.Subject, result: trials.Result, clean: dict[tuple[int, ...], trials.Result]
) -> str | None:
    """What differs from a clean run with the split that was recorded, or None."""
    if result.error is not None or result.split is None:
        return result.error
    key = tuple(result.split)
    if key not in clean:
        clean[key] = subject.run(split=result.split, is_clean=True)
    return result.differs_from(clean[key])


def judge_optimizer(result: trials.Result, plain: trials.Result) -> str | None:
    """What is wrong about a fault inside of optimizer.step, or None."""
    if not result.fired or not result.half_step:
        return f"no HalfStepError (error: {result.error})"
    if result.rng != plain.rng:
        return "random numbers differ"
    if result.left_bytes != 0:
        return f"{result.left_bytes} bytes left over"
    return None


def sweep_budgets(case: models.Case, count: int, found: Found) -> None:
    """Real limits from next to nothing to more than the step takes, and around the least that is enough."""
    subject = trials.Subject(case)
    clean: dict[tuple[int, ...], trials.Result] = {}
    most = subject.run().peak_bytes * 5 // 4 + SLACK_BYTES
    rooms = [most * (k + 1) // count for k in range(count)]
    found.faults["budget"] = 0

    def fits(room: int) -> bool:
        with subject.limit(room):
            result = subject.run()
        found.faults["budget"] += 1
        found.retried += result.retries > 0
        found.fitted += result.error is None
        words = result.error
        if words is None:
            words = _judge(subject, result, clean)
        elif not words.startswith(trials.OPTIMIZER):  # too little for any split
            words = f"{result.left_bytes} bytes left over" if result.left_bytes else None
        if words is not None:
            found.bad.append(f"room for {room} bytes: {words}")
        return result.error is None

    enough = min(room for room in rooms if fits(room) or room == most)
    too_little = max((room for room in rooms if room < enough), default=0)
    if found.fitted == 0:
        found.bad.append(f"no limit was enough (largest room: {most} bytes)")
    while enough - too_little > 1 and count == BUDGETS:
        middle = (enough + too_little) // 2
        if fits(middle):
            enough = middle
        else:
            too_little = middle
