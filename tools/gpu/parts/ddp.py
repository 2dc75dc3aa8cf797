"""A step of one rank over NCCL, brimful's reducer beside torch's DDP: launches, waits of the host, idle gap, time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tools.gpu import big_models
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import NEEDS_HARDWARE, SIMULATED, alone_over_nccl, settle
from torch import nn

WARM_UP, ROUNDS = 40, 15  # our plan is found in the first steps
SMALL_WARM_UP = 3
COUNTED = 5  # steps
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
MORE_LAUNCHES = 1.02  # than torch's, and no more waits than one a step
SLOWER = 1.03

Step = Callable[[], None]


def run(small: bool) -> Iterator[Check]:
    """Yields for each model the launches and waits, and on hardware idle gap and step time."""
    with alone_over_nccl():
        for name, (make, batch, loss) in _models(small).items():
            yield from _compare(
                name, _steps(make, batch, loss, SMALL_WARM_UP if small else WARM_UP)
            )
            settle()


def _models(small: bool) -> dict[str, Any]:
    if small:
        return {
            "ResNet": (
                lambda: big_models.resnet50(8, (1, 1, 1, 1)),
                torch.randn(4, 3, 32, 32),
                big_models.image_loss,
            ),
            "GPT": (
                lambda: big_models.Gpt(300, 32, 64, 2),
                torch.randint(300, (4, 17)),
                big_models.word_loss,
            ),
        }
    return {
        "ResNet-50": (
            big_models.resnet50,
            torch.randn(64, 3, 224, 224),
            big_models.image_loss,
        ),
        "GPT-2": (big_models.Gpt, torch.randint(50257, (8, 513)), big_models.word_loss),
    }


def _steps(
    make: Callable[[], nn.Module],
    batch: torch.Tensor,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    warm_up: int,
) -> dict[str, Step]:
    import brimful
    from brimful.reducer._whole_path import whole_path

    x = batch.cuda()
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "brimful": whole_path()(brimful.DistributedDataParallel),
        "torch": lambda module: nn.parallel.DistributedDataParallel(
            module, device_ids=[0], gradient_as_bucket_view=True
        ),
    }

    def step_of(wrap: Callable[[nn.Module], nn.Module]) -> Step:
        torch.manual_seed(0)
        model = wrap(make().cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

        def step() -> None:
            loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    steps = {name: step_of(wrap) for name, wrap in wrappers.items()}
    for step in steps.values():
        for _ in range(warm_up):
            step()
    torch.cuda.synchronize()
    return steps


def _compare(name: str, steps: dict[str, Step]) -> Iterator[Check]:
    ours, theirs = (_profiled(steps[who]) for who in ("brimful", "torch"))
    for what, most in {
        "launches": theirs["launches"] * MORE_LAUNCHES,
        "waits": theirs["waits"] + 1,
        "idle ms": float("inf"),
    }.items():
        words = f"{ours[what]:.1f} a step, torch's DDP {theirs[what]:.1f}"
        yield _judged(f"{name}: {what}", ours[what] <= most, words, ours[what])
    times: dict[str, list[float]] = {who: [] for who in steps}
    for round in range(1 if SIMULATED else ROUNDS):
        for who in sorted(steps, reverse=round % 2 == 1):
            times[who].append(_milliseconds(steps[who]))
    ratio = statistics.median(a / b for a, b in zip(times["brimful"], times["torch"], strict=True))
    words = ", ".join(f"{who} {statistics.median(ms):.2f} ms" for who, ms in times.items())
    yield _judged(f"{name}: step time", ratio <= SLOWER, f"{words}: {ratio:.3f}", ratio, ms=times)


def _judged(name: str, good: bool, words: str, value: float, **facts: Any) -> Check:
    return skipped(name, NEEDS_HARDWARE) if SIMULATED else check(name, good, words, value, **facts)


def _profiled(step: Step) -> dict[str, float]:
    """Per step: launches and waits by the profiler's runtime events, and milliseconds without work of the device."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(COUNTED):
            step()
        torch.cuda.synchronize()
    events = list(seen.events() or [])
    found = {
        "launches": sum(e.name in LAUNCHES or e.name.startswith("cuLaunch") for e in events),
        "waits": sum(e.name in WAITS for e in events) - 1,  # the one above
    }
    work = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0.0, float("-inf")
    for begin, until in work:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    idle = (end - work[0][0] - busy) / 1e3 if work else 0.0
    return {name: value / COUNTED for name, value in found.items()} | {"idle ms": idle / COUNTED}


def _milliseconds(step: Step) -> float:
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(COUNTED):
        step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / COUNTED
