"""One rank of a reducer benchmark: all cases, interleaved, gradients checked."""

from __future__ import annotations

import copy
import gc
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.reducer import cases

REFERENCE = cases.TORCH + "default"


@dataclass
class Samples:
    """What one rank measured: seconds a step, by case, one a round."""

    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    # Torch cases that failed to be built or to run, and why.
    failed_peers: dict[str, str] = field(default_factory=dict)
    # Cases whose gradients differ from torch's, and by how much.
    wrong: dict[str, str] = field(default_factory=dict)
    absent_flags: list[str] = field(default_factory=list)
    parameters: int = 0
    gradient_bytes: int = 0


@dataclass
class Step:
    """A case: what is timed, and the parameters whose gradients it fills (none for a bound)."""

    run: Callable[[], None]
    parameters: list[nn.Parameter] = field(default_factory=list)


def measure(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    model: cases.Model,
    warm_up_rounds: int,
    rounds: int,
    ours: str,
    bounds: bool,
) -> Samples:
    """Runs every case once a round, in an order that rotates; returns the samples."""
    warnings.filterwarnings("ignore")
    make_ours = cases.resolve(ours)
    samples = Samples()
    steps = _make_steps(model, rank, make_ours, samples, progress)
    if bounds:
        steps.update(_make_bounds(steps[cases.BARE], world_size))
    for k in range(warm_up_rounds):
        _run_round(_order(list(steps), k), steps, None)
        progress()
    _check_gradients(steps, samples)
    gc.collect()
    gc.disable()
    for k in range(rounds):
        _run_round(_order(list(steps), k), steps, samples)
        progress()
    gc.enable()
    _check_gradients(steps, samples)
    return samples


def _make_steps(
    model: cases.Model,
    rank: int,
    make_ours: Callable[[nn.Module], nn.Module],
    samples: Samples,
    progress: Callable[[], None],
) -> dict[str, Step]:
    base, x = model.make(), model.data(rank)
    flags, samples.absent_flags = cases.torch_flags()
    parameters = list(base.parameters())
    samples.parameters = len(parameters)
    samples.gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)
    steps = {
        name: _training_step(copy.deepcopy(base), x) for name in (cases.BARE, cases.BARE_AGAIN)
    }
    for name in (cases.OURS_CASE, cases.OURS_AGAIN):
        steps[name] = _training_step(make_ours(copy.deepcopy(base)), x)
    for name, arguments in flags.items():
        try:
            step = _training_step(cases.make_torch(copy.deepcopy(base), arguments), x)
            step.run()
        except Exception as error:
            samples.failed_peers[name] = f"{type(error).__name__}: {error}"
        else:
            steps[cases.TORCH + name] = step
        progress()
    return steps


def _training_step(module: nn.Module, x: torch.Tensor) -> Step:
    def run() -> None:
        module.zero_grad(set_to_none=True)
        module(x).sum().backward()

    return Step(run, list(module.parameters()))


def _make_bounds(bare: Step, world_size: int) -> dict[str, Step]:
    """The work that data parallelism cannot avoid: one scaled copy, one flat all-reduce."""
    gradients = [torch.randn_like(parameter) for parameter in bare.parameters]
    flat = torch.zeros(sum(gradient.numel() for gradient in gradients))
    sizes = [gradient.numel() for gradient in gradients]
    views = [
        part.view_as(gradient)
        for part, gradient in zip(torch.split(flat, sizes), gradients, strict=True)
    ]

    def copy_in() -> None:
        for view, gradient in zip(views, gradients, strict=True):
            torch.mul(gradient, 1 / world_size, out=view)

    def all_reduce() -> None:
        dist.all_reduce(other)

    other = torch.zeros_like(flat)
    return {"bound:copy": Step(copy_in), "bound:all_reduce": Step(all_reduce)}


def _order(names: list[str], k: int) -> list[str]:
    """The k-th round's order: each rotation forwards and then backwards, to change neighbours."""
    start = k // 2 % len(names)
    rotated = names[start:] + names[:start]
    return rotated[::-1] if k % 2 else rotated


def _run_round(order: list[str], steps: dict[str, Step], samples: Samples | None) -> None:
    for name in order:
        run = steps[name].run
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if samples is not None:
            samples.wall_s.setdefault(name, []).append(wall)
            samples.cpu_s.setdefault(name, []).append(cpu)


def _check_gradients(steps: dict[str, Step], samples: Samples) -> None:
    """Compares the gradients that the last step of each case left with torch's DDP's."""
    if REFERENCE not in steps:
        return
    reference = [_gradient(p) for p in steps[REFERENCE].parameters]
    scales = [float(gradient.abs().max()) for gradient in reference]
    if not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise RuntimeError("torch's gradients are zero or not finite: nothing to compare with")
    for name, step in steps.items():
        if name.startswith((cases.BARE, "bound:")) or name in samples.wrong:
            continue
        if len(step.parameters) != len(reference):
            samples.wrong[name] = f"has {len(step.parameters)} parameters, not {len(reference)}"
            continue
        for k, parameter in enumerate(step.parameters):
            difference = _difference(parameter.grad, reference[k], scales[k])
            if difference is not None:
                samples.wrong[name] = f"gradient of parameter {k}: {difference}"
                break


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError("torch's DDP left a parameter without a gradient")
    return parameter.grad


def _difference(gradient: torch.Tensor | None, expected: torch.Tensor, scale: float) -> str | None:
    if gradient is None:
        return "missing"
    # Most are bit-equal, and allclose costs far more.
    if torch.equal(gradient, expected):
        return None
    if torch.allclose(gradient, expected, rtol=1e-5, atol=1e-6 * scale):
        return None
    return f"differs by {float((gradient - expected).abs().max()) / scale:.2g} of its largest value"
