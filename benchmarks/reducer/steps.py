"""Steps against torch's DDP with each of its flags, in one interleaved run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import common, intervals, ranks
from benchmarks.reducer import cases, report, worker
from benchmarks.reducer.report import Columns, Conditions, Request
from benchmarks.reducer.rounds import Samples

SMALL = cases.Model(layers=400, width=64, batch=8, bias=True)
WIDE = cases.Model(layers=6, width=1400, batch=16, bias=False)


@dataclass(frozen=True)
class Spec:
    """A figure: its model, its number of ranks, and what its ratio is taken of."""

    model: cases.Model
    world_size: int
    of: str  # "overhead" or "step"
    bounds: bool = False  # time the copy and the flat all-reduce as well
    hooks: bool = False  # torch's communication hooks are peers as well
    bf16_wire: bool = False  # torch's peers have bf16_compress_hook
    rounds: int = 60
    quick_rounds: int = 5
    ours: str = cases.OURS


SPECS = {
    "reducer.small_params_w1": Spec(SMALL, 1, "overhead"),
    "reducer.small_params_w2": Spec(SMALL, 2, "overhead", bounds=True),
    "reducer.wide_w1": Spec(WIDE, 1, "overhead", bounds=True, hooks=True),
    "reducer.wide_w2": Spec(WIDE, 2, "step", bounds=True, hooks=True, quick_rounds=3),
    "reducer.wide_w2_bf16": Spec(
        WIDE, 2, "step", bounds=True, bf16_wire=True, quick_rounds=3, ours=cases.OURS_BF16
    ),
}


def measure_of(figure_id: str) -> Callable[[Request, Conditions], Iterator[common.Figure]]:
    """Returns the function that measures one figure."""

    def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
        spec = SPECS[figure_id]
        rounds = request.rounds(spec.rounds, spec.quick_rounds)
        ours = request.factory(spec.ours)
        conditions.update(
            ours=ours,
            model=spec.model.text,
            batch_per_rank=spec.model.batch,
            world_size=spec.world_size,
            backend="gloo",
            zero_grad="set_to_none=True",
            value=f"ratio of {spec.of}s",
            warm_up_rounds=request.warm_up_rounds,
        )
        by_rank = ranks.run_ranks(
            spec.world_size,
            worker.measure,
            spec.model,
            request.warm_up_rounds,
            rounds,
            ours,
            worker.Options(spec.bounds, spec.hooks, spec.bf16_wire),
            stall_s=request.stall_s,
        )
        yield evaluate(figure_id, spec, rounds, by_rank, conditions)

    return measure


def evaluate(
    figure_id: str, spec: Spec, rounds: int, by_rank: list[Samples], conditions: Conditions
) -> common.Figure:
    """Returns the figure of the ranks' samples."""
    first = by_rank[0]
    conditions.update(
        parameters=first.parameters,
        gradient_bytes=first.gradient_bytes,
        torch_flags_absent=first.absent_flags,
    )
    if spec.bf16_wire:
        conditions["wire"] = _wire(first)
    reason = report.why_not(by_rank)
    if reason is not None:
        return common.unmeasured(figure_id, reason, rounds=rounds, conditions=conditions)
    wall, cpu = report.wall_and_cpu(by_rank)
    medians = report.medians_of(wall, cpu)
    peer = report.best_torch(wall)
    conditions["cases"] = medians
    if spec.bounds:
        conditions["bound"] = _bound(medians, peer)
    report.print_cases(figure_id, medians, cases.BARE, peer)
    _add_ratios(spec, wall, cpu, peer, conditions)
    _print_beside(conditions)
    known: dict[str, Any] = {"rounds": rounds, "conditions": conditions}
    try:
        value = _ratio(spec.of, wall, cases.OURS_CASE, peer)
    except intervals.NotResolved as error:
        return common.unmeasured(figure_id, str(error), peer=peer, **known)
    return report.figure_of(figure_id, value, rounds, conditions, peer)


def _wire(samples: Samples) -> dict[str, Any]:
    """Bytes that our rank gave to collectives in a step, and what fp32 gradients would take."""
    found = samples.more["wire_bytes"]
    if not isinstance(found, int):
        return {"bytes": None, "to_fp32": None, "reason": found}
    return {"bytes": found, "to_fp32": found / samples.gradient_bytes}


def _add_ratios(spec: Spec, wall: Columns, cpu: Columns, peer: str, conditions: Conditions) -> None:
    """What stands beside the value: steps, CPU time, and the same thing measured twice (A/A)."""
    conditions["step_ratio"] = _try_ratio("step", wall, cases.OURS_CASE, peer)
    if cases.FP32_WIRE in wall:
        conditions["step_to_fp32_wire"] = _try_ratio("step", wall, cases.OURS_CASE, cases.FP32_WIRE)
    conditions["a_a"] = _try_ratio(spec.of, wall, cases.OURS_AGAIN, cases.OURS_CASE)
    conditions["a_a_bare_step"] = _try_ratio("step", wall, cases.BARE_AGAIN, cases.BARE)
    conditions["cpu_time"] = _try_ratio(spec.of, cpu, cases.OURS_CASE, peer)
    conditions["cpu_time_a_a"] = _try_ratio(spec.of, cpu, cases.OURS_AGAIN, cases.OURS_CASE)


def _ratio(of: str, columns: Columns, ours: str, peer: str) -> intervals.Interval:
    if of == "step":
        return intervals.median_ratio(columns[ours], columns[peer])
    return intervals.overhead_ratio(columns[ours], columns[peer], columns[cases.BARE])


def _try_ratio(of: str, columns: Columns, ours: str, peer: str) -> dict[str, float] | None:
    try:
        return common.interval_dict(_ratio(of, columns, ours, peer))
    except intervals.NotResolved:
        return None


def _bound(medians: dict[str, dict[str, float]], peer: str) -> dict[str, float]:
    """What no reducer can beat without overlap (sum) and with perfect overlap (max)."""
    names = (cases.BARE, "bound:copy", "bound:all_reduce", peer)
    *parts, of_peer = (medians[name]["wall_s"] for name in names)
    return {
        "sum_s": sum(parts),
        "max_s": max(parts),
        "sum_to_peer": sum(parts) / of_peer,
        "max_to_peer": max(parts) / of_peer,
        "overhead_sum_to_peer": (sum(parts) - parts[0]) / (of_peer - parts[0]),
        "overhead_all_reduce_to_peer": parts[2] / (of_peer - parts[0]),
    }


def _print_beside(conditions: Conditions) -> None:
    names = {
        "step_ratio": "step, ours / peer",
        "step_to_fp32_wire": "step, ours / torch's default on a fp32 wire",
        "cpu_time": f"{conditions['value']}, by CPU time",
        "a_a": f"A/A {conditions['value']}, ours again / ours",
        "cpu_time_a_a": "A/A by CPU time",
        "a_a_bare_step": "A/A step, bare again / bare",
    }
    for key, text in names.items():
        if key in conditions:
            report.print_line(text, conditions[key])
    for key in ("sum", "max") if "bound" in conditions else ():
        bound = conditions["bound"]
        shown = (
            f"{bound[key + '_s'] * 1e3:.3f} ms, {bound[key + '_to_peer']:.3f} of the peer's step"
        )
        report.print_line(f"bound, {key} of bare, copy, flat all_reduce", shown)
    if "bound" in conditions:
        shown = f"{conditions['bound']['overhead_all_reduce_to_peer']:.3f}"
        report.print_line("flat all_reduce alone / the peer's overhead", shown)
    if "wire" in conditions:
        wire = conditions["wire"]
        shown = wire.get("reason") or f"{wire['bytes']} bytes, {wire['to_fp32']:.3f} of fp32"
        report.print_line("on the wire, a rank and step", shown)
