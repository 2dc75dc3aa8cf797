"""What the step's one host wait costs on a GPU: the device is idle until the optimizer's first kernel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import common, intervals, ranks
from benchmarks.reducer import cases, report, rounds
from benchmarks.reducer.report import Columns, Conditions, Request
from benchmarks.reducer.rounds import Samples, Step

IDS = ("reducer.host_wait",)
# One parameter a layer: the first layer's gradient is the last to come. 2.25 MiB: all in flat buckets.
MODEL = cases.Model(layers=32, width=768, batch=4096, bias=False)
ROUNDS, QUICK_ROUNDS = 60, 5
# A case runs so many steps without a wait between them: a host that may run ahead needs some to do so.
BURST = 20
LEARNING_RATE = 0.0  # the kernels run, and all cases keep the same parameters
GAP = "gap_s"
TORCH_CASES = {
    "default": cases.TorchCase({}),
    "view": cases.TorchCase({"gradient_as_bucket_view": True}),
    "static+view": cases.TorchCase({"static_graph": True, "gradient_as_bucket_view": True}),
}


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Yields (our gap - the peer's gap) / our step; a gap is device time from gradients to optimizer."""
    count = request.rounds(ROUNDS, QUICK_ROUNDS)
    ours = request.factory()
    conditions.update(
        ours=ours,
        model=MODEL.text,
        batch_per_rank=MODEL.batch,
        world_size=1,
        backend="nccl",
        zero_grad="set_to_none=True",
        value="(gap of ours - gap of the peer) / step of ours, by the device's clock",
        steps_a_round=BURST,
        warm_up_rounds=request.warm_up_rounds,
    )
    if not torch.cuda.is_available():
        raise report.Unmeasured(common.NEEDS_CUDA)
    conditions["device"] = torch.cuda.get_device_name(0)
    by_rank = ranks.run_ranks(
        1, work, MODEL, request.warm_up_rounds, count, ours, stall_s=request.stall_s
    )
    yield evaluate(by_rank[0], count, conditions)


def evaluate(samples: Samples, count: int, conditions: Conditions) -> common.Figure:
    """Returns the figure of the rank's samples."""
    conditions.update(parameters=samples.parameters, gradient_bytes=samples.gradient_bytes)
    report.require_usable([samples])
    wall, cpu = report.wall_and_cpu([samples])
    gaps: Columns = samples.more[GAP]
    peer = report.best_torch(wall)
    conditions["cases"] = report.medians_of(wall, cpu)
    for name, values in gaps.items():
        conditions["cases"][name][GAP] = intervals.median(values)
    ratio = intervals.median_ratio
    conditions["step_ratio"] = common.interval_dict(ratio(wall[cases.OURS_CASE], wall[peer]))
    again = _fraction(wall, gaps, cases.OURS_AGAIN, cases.OURS_CASE)
    conditions["a_a"] = common.interval_dict(again)
    report.print_cases("reducer.host_wait", conditions["cases"], cases.BARE, peer)
    for name in sorted(gaps):
        report.print_line(f"gap, {name}", f"{intervals.median(gaps[name]) * 1e6:.1f} us")
    report.print_line("step, ours / peer", conditions["step_ratio"])
    report.print_line("A/A, (gap of ours again - ours) / step", conditions["a_a"])
    value = _fraction(wall, gaps, cases.OURS_CASE, peer)
    return report.figure_of("reducer.host_wait", value, count, conditions, peer)


def _fraction(wall: Columns, gaps: Columns, name: str, base: str) -> intervals.Interval:
    """Returns by which fraction of its step the gap of `name` is longer than that of `base`."""
    longer = [a - b for a, b in zip(gaps[name], gaps[base], strict=True)]
    return intervals.median_ratio(longer, wall[name])


def work(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    model: cases.Model,
    warm_up_rounds: int,
    timed_rounds: int,
    ours: str,
) -> Samples:
    """Runs the cases of the one rank, a burst of steps each round."""
    warnings.filterwarnings("ignore")
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    make_ours = cases.resolve(ours)
    base, x = model.make().cuda(), model.data(rank).cuda()
    samples = Samples()
    samples.describe(base)
    # Bucket sizes are not tried, or the first rounds would be the planner's.
    wrapped: dict[str, nn.Module] = {cases.BARE: copy.deepcopy(base)}
    for name in (cases.OURS_CASE, cases.OURS_AGAIN):
        wrapped[name] = make_ours(copy.deepcopy(base), plan="ordered", process_group=group)
    for name, case in TORCH_CASES.items():
        flags = {**case.flags, "process_group": group}
        wrapped[cases.TORCH + name] = cases.make_torch(
            copy.deepcopy(base), cases.TorchCase(flags, case.hook)
        )
    gaps: Columns = {name: [] for name in wrapped}
    steps = {name: _burst(module, x, gaps[name]) for name, module in wrapped.items()}

    def check() -> None:
        checked = {name: step for name, step in steps.items() if name != cases.BARE}
        rounds.check_gradients(checked, cases.TORCH + "default", samples)

    rounds.interleave(steps, warm_up_rounds, timed_rounds, progress, samples, check)
    samples.more[GAP] = {name: values[-timed_rounds:] for name, values in gaps.items()}
    for columns in (samples.wall_s, samples.cpu_s):
        for name, values in columns.items():
            columns[name] = [seconds / BURST for seconds in values]
    return samples


def _burst(module: nn.Module, x: torch.Tensor, gaps: list[float]) -> Step:
    """Returns BURST steps, which add the median of their gaps to `gaps`."""
    parameters = list(module.parameters())
    last_gradient = [torch.cuda.Event(enable_timing=True) for _ in range(BURST)]
    optimizer = [torch.cuda.Event(enable_timing=True) for _ in range(BURST)]
    pending = iter(last_gradient)

    # Before the wrapper's own hook, in the stream that made the gradient.
    parameters[0].register_post_accumulate_grad_hook(lambda _: next(pending).record())

    def run() -> None:
        nonlocal pending
        pending = iter(last_gradient)
        for begins in optimizer:
            module.zero_grad(set_to_none=True)
            module(x).sum().backward()
            gradients = [parameter.grad for parameter in parameters]
            # Right before the first kernel: a bare loop's host is far ahead here, ours has just waited.
            begins.record()
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-LEARNING_RATE)
        torch.cuda.synchronize()
        pairs = zip(last_gradient, optimizer, strict=True)
        gaps.append(intervals.median([a.elapsed_time(b) * 1e-3 for a, b in pairs]))

    return Step(run, parameters)
