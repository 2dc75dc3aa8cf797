"""The first iteration of a fresh wrapper: its time and its peak."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks import common, intervals, ranks
from benchmarks.reducer import cases, report, rounds, worker
from benchmarks.reducer.report import Columns, Conditions, Request
from benchmarks.reducer.rounds import Samples

IDS = ("reducer.first_time", "reducer.first_peak")
MODEL = cases.Model(layers=6, width=1400, batch=16, bias=False)
WORLD_SIZE = 2
WRAPPERS, QUICK_WRAPPERS = 20, 3


@dataclass
class FirstSamples(Samples):
    """Beside the first iteration's times: its peak bytes and the constructor's time and peak."""

    peak_bytes: Columns = field(default_factory=dict)
    construct_s: Columns = field(default_factory=dict)
    construct_peak_bytes: Columns = field(default_factory=dict)


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Yields the ratio of times to the best of torch's flags, of peaks to torch's default."""
    count = request.rounds(WRAPPERS, QUICK_WRAPPERS)
    ours = request.factory()
    conditions.update(
        ours=ours,
        model=MODEL.text,
        batch_per_rank=MODEL.batch,
        world_size=WORLD_SIZE,
        backend="gloo",
        fresh_wrappers=count,
        value="first iteration, ours / peer; peaks include the parameters",
    )
    by_rank: list[FirstSamples] = ranks.run_ranks(
        WORLD_SIZE, work, MODEL, count, ours, stall_s=request.stall_s
    )
    conditions.update(
        parameters=by_rank[0].parameters,
        gradient_bytes=by_rank[0].gradient_bytes,
        torch_flags_absent=by_rank[0].absent_flags,
    )
    report.require_usable(by_rank)
    yield from evaluate(by_rank, count, conditions)


def evaluate(
    by_rank: list[FirstSamples], count: int, conditions: Conditions
) -> Iterator[common.Figure]:
    """Yields both figures of the ranks' samples."""
    wall, cpu = report.wall_and_cpu(by_rank)
    peaks = report.over_ranks([samples.peak_bytes for samples in by_rank], max)
    medians = report.medians_of(wall, cpu)
    beside = {
        "peak_bytes": peaks,
        "construct_s": report.over_ranks([samples.construct_s for samples in by_rank], max),
        "construct_peak_bytes": report.over_ranks(
            [samples.construct_peak_bytes for samples in by_rank], max
        ),
    }
    for name in medians:
        medians[name].update({key: intervals.median(c[name]) for key, c in beside.items()})
    conditions["cases"] = medians
    fastest, leanest = report.best_torch(wall), report.best_torch(peaks)
    report.print_cases("reducer.first_time", medians, None, fastest)
    of_time = {
        **conditions,
        "cpu_time": common.interval_dict(
            intervals.median_ratio(cpu[cases.OURS_CASE], cpu[fastest])
        ),
        "a_a": common.interval_dict(
            intervals.median_ratio(wall[cases.OURS_AGAIN], wall[cases.OURS_CASE])
        ),
        "with_constructor": common.interval_dict(_with_constructor(wall, beside, fastest)),
    }
    report.print_line("A/A", of_time["a_a"])
    report.print_line("with the constructor", of_time["with_constructor"])
    time_ratio = intervals.median_ratio(wall[cases.OURS_CASE], wall[fastest])
    yield report.figure_of("reducer.first_time", time_ratio, count, of_time, fastest)

    # A view of torch's one bucket holds no second copy and leaves nothing to save; see the README.
    default = worker.REFERENCE
    of_peak = {
        **conditions,
        "a_a": common.interval_dict(
            intervals.median_ratio(peaks[cases.OURS_AGAIN], peaks[cases.OURS_CASE])
        ),
        "leanest": leanest,
        "to_leanest": common.interval_dict(
            intervals.median_ratio(peaks[cases.OURS_CASE], peaks[leanest])
        ),
    }
    print("\nreducer.first_peak: median of the peak in MiB, parameters included")
    for name, times in sorted(medians.items(), key=lambda item: item[1]["peak_bytes"]):
        mark = "  <- peer" if name == default else ""
        print(f"  {name:<26}{times['peak_bytes'] / 2**20:9.2f}{mark}")
    report.print_line(f"to the leanest of torch's flags, {leanest}", of_peak["to_leanest"])
    peak_ratio = intervals.median_ratio(peaks[cases.OURS_CASE], peaks[default])
    yield report.figure_of("reducer.first_peak", peak_ratio, count, of_peak, default)


def _with_constructor(wall: Columns, beside: dict[str, Columns], peer: str) -> intervals.Interval:
    both = {
        name: [a + b for a, b in zip(wall[name], beside["construct_s"][name], strict=True)]
        for name in (cases.OURS_CASE, peer)
    }
    return intervals.median_ratio(both[cases.OURS_CASE], both[peer])


def work(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    model: cases.Model,
    count: int,
    ours: str,
) -> FirstSamples:
    """Makes and runs `count` + 1 fresh wrappers of each case; the first round is thrown away."""
    warnings.filterwarnings("ignore")
    import brimful.memory  # before any tensor: its allocator counts what comes after

    samples = FirstSamples()
    base, x = model.make(), model.data(rank)
    samples.describe(base)
    make_ours = cases.resolve(ours)
    torch_cases, samples.absent_flags = cases.torch_cases()
    make = {cases.OURS_CASE: make_ours, cases.OURS_AGAIN: make_ours}
    for name, case in torch_cases.items():
        make[cases.TORCH + name] = lambda module, case=case: cases.make_torch(module, case)
    reference: list[torch.Tensor | None] = []
    names = [worker.REFERENCE, *(name for name in make if name != worker.REFERENCE)]
    for k in range(count + 1):
        for name in rounds.order(names, k):
            gc.collect()
            before = brimful.memory.stats("cpu").used_bytes
            module = copy.deepcopy(base)
            brimful.memory.reset_peak("cpu")
            dist.barrier()
            began = time.perf_counter()
            wrapped = make[name](module)
            construct_s = time.perf_counter() - began
            construct_peak = brimful.memory.stats("cpu").peak_bytes - before
            brimful.memory.reset_peak("cpu")
            step = worker.training_step(wrapped, x)
            wall, cpu = rounds.timed(step.run)
            peak = brimful.memory.stats("cpu").peak_bytes - before
            gradients = [p.grad for p in step.parameters]
            if not reference:
                reference = [g if g is None else g.clone() for g in gradients]
            difference = rounds.differences(gradients, reference)
            if difference is not None:
                samples.wrong.setdefault(name, f"differs from {worker.REFERENCE}: {difference}")
            if k > 0:
                for column, value in (
                    (samples.wall_s, wall),
                    (samples.cpu_s, cpu),
                    (samples.peak_bytes, peak),
                    (samples.construct_s, construct_s),
                    (samples.construct_peak_bytes, construct_peak),
                ):
                    column.setdefault(name, []).append(value)
            del module, wrapped, step, gradients
            progress()
    return samples
