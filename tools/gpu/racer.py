"""One wrapper of one model in a process of its own: python -m tools.gpu.racer CASE WRAPPER [--small]

A line of the standard input is a command, `steps N` or `profile N`; each is answered by a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tools.gpu import big_models
from tools.gpu.device import alone_over_nccl
from torch import nn

Step = Callable[[], None]
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Case:
    """A model, its batch and its loss; `dtype`: of autocast, whose images are channels-last."""

    make: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None = None


def _images(rows: int, side: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(rows, 3, side, side)


def _words(rows: int, length: int, words: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(words, (rows, length + 1))


def _tiny(layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])


def _square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x).square().mean()
    return out


_RESNET = Case(big_models.resnet50, _images(64, 224), big_models.image_loss)
_GPT = Case(big_models.Gpt, _words(8, 512, 50257), big_models.word_loss)
CASES = {
    "ResNet-50 fp32": _RESNET,
    "GPT-2 fp32": _GPT,
    "200 Linear(64, 64)": Case(_tiny(200), lambda: torch.randn(32, 64), _square),
    "ResNet-50 bf16": Case(_RESNET.make, _RESNET.batch, _RESNET.loss, torch.bfloat16),
    "GPT-2 bf16": Case(_GPT.make, _GPT.batch, _GPT.loss, torch.bfloat16),
}
SMALL_CASES = {
    "ResNet-50 fp32": Case(
        lambda: big_models.resnet50(8, (1, 1, 1, 1)), _images(4, 32), big_models.image_loss
    ),
    "GPT-2 fp32": Case(
        lambda: big_models.Gpt(300, 32, 64, 2), _words(4, 16, 300), big_models.word_loss
    ),
}


def _torchs(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: nn.parallel.DistributedDataParallel(
        module, device_ids=[torch.cuda.current_device()], **options
    )


def _brimfuls(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(module: nn.Module) -> nn.Module:
        import brimful
        from brimful.reducer._whole_path import whole_path

        with whole_path():
            return brimful.DistributedDataParallel(module, **options)

    return wrap


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "torch": _torchs(),
    "torch, bucket views": _torchs(gradient_as_bucket_view=True),
    "torch, batched copies": _torchs(batched_grad_copy=True),  # newer than torch 2.11
    "brimful": _brimfuls(),
    'brimful, plan="registration"': _brimfuls(plan="registration"),
}


def make_step(case: Case, wrapper: str) -> tuple[nn.Module, Step]:
    """The wrapped model on the device, and a plain loop's step of it."""
    torch.manual_seed(0)
    module, x = case.make().cuda(), case.batch().cuda()
    if case.dtype is not None and x.dim() == 4:
        module = module.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    model = WRAPPERS[wrapper](module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        with contextlib.nullcontext() if case.dtype is None else torch.autocast("cuda", case.dtype):
            loss = case.loss(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def timed(step: Step, count: int) -> dict[str, float]:
    """Milliseconds a step on the device, and until the host has issued it."""
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    first.record()
    for _ in range(count):
        step()
    last.record()
    host_ms = 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    return {"ms": first.elapsed_time(last) / count, "host_ms": host_ms / count}


def profiled(step: Step, count: int) -> dict[str, Any]:
    """Per step: calls of the runtime by kind, host time by operator, idle time of the device, collectives.

    Of these `record_param_comms` would count waits too: by kind they are those of the dispatcher.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    issued = _issued()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    averages = seen.key_averages()
    calls = {a.key: a.count for a in averages if a.key.startswith(("cuda", "cuLaunch"))}
    if "cudaDeviceSynchronize" in calls:
        calls["cudaDeviceSynchronize"] -= 1  # the one above
    slowest = sorted(averages, key=lambda a: -a.self_cpu_time_total)[:50]
    return {
        "runtime_calls": {name: number / count for name, number in calls.items()},
        "launches": _sum(calls, lambda n: n in LAUNCHES or n.startswith("cuLaunch")) / count,
        "waits": _sum(calls, lambda n: n in WAITS) / count,
        "idle_ms": _idle_ms(seen) / count,
        "host_us": {
            a.key[:90]: [a.count / count, round(a.self_cpu_time_total / count, 1)] for a in slowest
        },
        "collectives": {
            a.key.removeprefix("c10d::").strip("_"): a.count / count
            for a in averages
            if a.key.startswith("c10d::")
        },
        "issued": (_issued() - issued) / count,
    }


def _sum(calls: dict[str, int], is_wanted: Callable[[str], bool]) -> int:
    return sum(number for name, number in calls.items() if is_wanted(name))


def _idle_ms(seen: Any) -> float:
    """Between the first and the last work of the device."""
    work = sorted(
        (e.time_range.start, e.time_range.end)
        for e in seen.events() or []
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0.0, float("-inf")
    for begin, until in work:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return (end - work[0][0] - busy) / 1e3 if work else 0.0


def _issued() -> int:
    """Collectives as the backend of the default group counts them."""
    number: int = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
    return number


def _answers(case: Case, wrapper: str) -> Iterator[dict[str, Any]]:
    with alone_over_nccl():
        model, step = make_step(case, wrapper)
        yield {"parameters": sum(p.numel() for p in model.parameters())}
        for line in sys.stdin:
            name, count = line.split()
            if name == "steps":
                yield timed(step, int(count))
            elif name == "profile":
                yield profiled(step, int(count)) | {"plan": getattr(model, "plan", None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("wrapper", choices=WRAPPERS)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    case = (SMALL_CASES if given.small else CASES)[given.case]
    for answer in _answers(case, given.wrapper):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
    os._exit(0)
