"""The reducer against torch's DDP with each of its flags, in one interleaved run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common, intervals, ranks
from benchmarks.reducer import cases, worker

SMALL = cases.Model(layers=400, width=64, batch=8, bias=True)
WIDE = cases.Model(layers=6, width=1400, batch=16, bias=False)


@dataclass(frozen=True)
class Spec:
    """A figure: its model, its number of ranks, and what its ratio is taken of."""

    model: cases.Model
    world_size: int
    of: str  # "overhead" or "step"
    bounds: bool = False  # time the copy and the flat all-reduce as well
    rounds: int = 60
    quick_rounds: int = 5


SPECS = {
    "reducer.small_params_w1": Spec(SMALL, 1, "overhead"),
    "reducer.small_params_w2": Spec(SMALL, 2, "overhead"),
    "reducer.wide_w1": Spec(WIDE, 1, "overhead", bounds=True),
    "reducer.wide_w2": Spec(WIDE, 2, "step", bounds=True, quick_rounds=3),
}
# torch rebuilds its buckets in the second iteration.
WARM_UP_ROUNDS = 4
QUICK_WARM_UP_ROUNDS = 2
STALL_S = 60.0

Columns = dict[str, list[float]]


def figures(
    quick: bool, only: Sequence[str] = (), ours: str = cases.OURS, stall_s: float = STALL_S
) -> Iterator[common.Figure]:
    """Measures each figure, or those named in `only`, and yields it when it is ready."""
    for figure_id, spec in SPECS.items():
        if not only or figure_id in only:
            yield measure(figure_id, spec, quick, ours, stall_s)


def measure(
    figure_id: str, spec: Spec, quick: bool, ours: str, stall_s: float = STALL_S
) -> common.Figure:
    """Runs one figure's ranks and works the figure out; every failure becomes its reason."""
    rounds = spec.quick_rounds if quick else spec.rounds
    warm_up_rounds = QUICK_WARM_UP_ROUNDS if quick else WARM_UP_ROUNDS
    conditions: dict[str, Any] = {
        **common.machine_conditions(),
        "ours": ours,
        "model": f"{spec.model.layers} x Linear({spec.model.width}, bias={spec.model.bias})",
        "batch_per_rank": spec.model.batch,
        "world_size": spec.world_size,
        "backend": "gloo",
        "zero_grad": "set_to_none=True",
        "value": f"ratio of {spec.of}s",
        "warm_up_rounds": warm_up_rounds,
    }
    try:
        by_rank = ranks.run_ranks(
            spec.world_size,
            worker.measure,
            spec.model,
            warm_up_rounds,
            rounds,
            ours,
            spec.bounds,
            stall_s=stall_s,
        )
    except ranks.RanksFailed as error:
        return common.unmeasured(figure_id, str(error), conditions=conditions)
    return evaluate(figure_id, spec, rounds, by_rank, conditions)


def evaluate(
    figure_id: str,
    spec: Spec,
    rounds: int,
    by_rank: list[worker.Samples],
    conditions: dict[str, Any],
) -> common.Figure:
    """Returns the figure of the ranks' samples."""
    first = by_rank[0]
    conditions.update(
        parameters=first.parameters,
        gradient_bytes=first.gradient_bytes,
        torch_flags_absent=first.absent_flags,
    )
    reason = _why_not(by_rank)
    if reason is not None:
        return common.unmeasured(figure_id, reason, rounds=rounds, conditions=conditions)
    # A step ends when its slowest rank ends; CPU time is a rank's own, averaged.
    wall = _combine([samples.wall_s for samples in by_rank], max)
    cpu = _combine([samples.cpu_s for samples in by_rank], lambda row: sum(row) / len(row))
    medians = {name: intervals.median(column) for name, column in wall.items()}
    peer = min((name for name in wall if name.startswith(cases.TORCH)), key=medians.__getitem__)
    conditions["cases"] = {
        name: {"wall_s": medians[name], "cpu_s": intervals.median(cpu[name])} for name in wall
    }
    if spec.bounds:
        conditions["bound"] = _bound(medians, peer)
    _print_cases(figure_id, conditions["cases"], peer)
    _add_ratios(spec, wall, cpu, peer, conditions)
    _print_ratios(conditions)
    known: dict[str, Any] = {"rounds": rounds, "conditions": conditions}
    try:
        value = _ratio(spec.of, wall, cases.OURS_CASE, peer)
    except intervals.NotResolved as error:
        return common.unmeasured(figure_id, str(error), peer=peer, **known)
    unit = common.load_ids()[figure_id].unit
    return common.Figure(figure_id, unit, value.value, value.low, value.high, peer, **known)


def _add_ratios(
    spec: Spec, wall: Columns, cpu: Columns, peer: str, conditions: dict[str, Any]
) -> None:
    """What stands beside the value: steps, CPU time, and the same thing measured twice (A/A)."""
    conditions["step_ratio"] = _try_ratio("step", wall, cases.OURS_CASE, peer)
    conditions["a_a"] = _try_ratio(spec.of, wall, cases.OURS_AGAIN, cases.OURS_CASE)
    conditions["a_a_bare_step"] = _try_ratio("step", wall, cases.BARE_AGAIN, cases.BARE)
    conditions["cpu_time"] = _try_ratio(spec.of, cpu, cases.OURS_CASE, peer)
    conditions["cpu_time_a_a"] = _try_ratio(spec.of, cpu, cases.OURS_AGAIN, cases.OURS_CASE)


def _why_not(by_rank: list[worker.Samples]) -> str | None:
    for rank, samples in enumerate(by_rank):
        for name, error in samples.failed_peers.items():
            return f"peer torch:{name} failed on rank {rank}, so the best is unknown: {error}"
        for name, difference in samples.wrong.items():
            return f"{name} differs from {worker.REFERENCE} on rank {rank}: {difference}"
    return None


def _combine(columns: list[Columns], reduce: Callable[[list[float]], float]) -> Columns:
    return {
        name: [reduce(list(row)) for row in zip(*(c[name] for c in columns), strict=True)]
        for name in columns[0]
    }


def _ratio(of: str, columns: Columns, ours: str, peer: str) -> intervals.Interval:
    if of == "step":
        return intervals.median_ratio(columns[ours], columns[peer])
    return intervals.overhead_ratio(columns[ours], columns[peer], columns[cases.BARE])


def _try_ratio(of: str, columns: Columns, ours: str, peer: str) -> dict[str, float] | None:
    try:
        return common.interval_dict(_ratio(of, columns, ours, peer))
    except intervals.NotResolved:
        return None


def _bound(medians: dict[str, float], peer: str) -> dict[str, float]:
    """What no reducer can beat without overlap (sum) and with perfect overlap (max)."""
    parts = [medians[cases.BARE], medians["bound:copy"], medians["bound:all_reduce"]]
    return {
        "sum_s": sum(parts),
        "max_s": max(parts),
        "sum_to_peer": sum(parts) / medians[peer],
        "max_to_peer": max(parts) / medians[peer],
        "overhead_sum_to_peer": (sum(parts) - parts[0]) / (medians[peer] - parts[0]),
    }


def _print_cases(figure_id: str, measured: dict[str, dict[str, float]], peer: str) -> None:
    bare = measured[cases.BARE]["wall_s"]
    print(f"\n{figure_id}: medians in ms a step (wall, above bare, CPU time a rank)")
    for name, times in sorted(measured.items(), key=lambda item: item[1]["wall_s"]):
        above = "" if name.startswith("bound:") else f"{(times['wall_s'] - bare) * 1e3:+9.3f}"
        mark = "  <- peer" if name == peer else ""
        wall_ms, cpu_ms = times["wall_s"] * 1e3, times["cpu_s"] * 1e3
        print(f"  {name:<26}{wall_ms:9.3f} {above:>9} {cpu_ms:9.3f}{mark}")
    sys.stdout.flush()


def _print_ratios(conditions: dict[str, Any]) -> None:
    names = {
        "step_ratio": "step, ours / peer",
        "cpu_time": f"{conditions['value']}, by CPU time",
        "a_a": f"A/A {conditions['value']}, ours again / ours",
        "cpu_time_a_a": "A/A by CPU time",
        "a_a_bare_step": "A/A step, bare again / bare",
    }
    for key, text in names.items():
        found = conditions[key]
        shown = "not above the noise"
        if found is not None:
            shown = f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
        print(f"  {text + ':':<44}{shown}")
    for key in ("sum", "max"):
        if "bound" in conditions:
            text = f"bound, {key} of bare, copy, flat all_reduce:"
            bound = conditions["bound"]
            of_peer = f"{bound[key + '_to_peer']:.3f} of the peer's step"
            print(f"  {text:<44}{bound[key + '_s'] * 1e3:.3f} ms, {of_peer}")
    sys.stdout.flush()
