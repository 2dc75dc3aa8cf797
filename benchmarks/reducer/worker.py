"""One rank of a step's figure: all cases, interleaved, gradients checked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.reducer import cases, rounds
from benchmarks.reducer.rounds import Samples, Step

REFERENCE = cases.TORCH + "default"


@dataclass(frozen=True)
class Options:
    """What a figure adds to ours, the bare module and torch's flags; see steps.Spec."""

    bounds: bool = False
    hooks: bool = False
    bf16_wire: bool = False


def measure(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    model: cases.Model,
    warm_up_rounds: int,
    timed_rounds: int,
    ours: str,
    options: Options,
) -> Samples:
    """Runs every case once a round, in an order that rotates; returns the samples."""
    warnings.filterwarnings("ignore")
    make_ours = cases.resolve(ours)
    samples = Samples()
    base, x = model.make(), model.data(rank)
    samples.describe(base)
    wrapped = [make_ours(copy.deepcopy(base)) for _ in range(2)]
    steps = {name: training_step(copy.deepcopy(base), x) for name in (cases.BARE, cases.BARE_AGAIN)}
    for name, module in zip((cases.OURS_CASE, cases.OURS_AGAIN), wrapped, strict=True):
        steps[name] = training_step(module, x)
    torch_cases, samples.absent_flags = cases.torch_cases(options.hooks, options.bf16_wire)
    add_torch(steps, torch_cases, base, lambda module: training_step(module, x), samples, progress)
    if options.bounds:
        dtype = torch.bfloat16 if options.bf16_wire else torch.float32
        steps.update(_make_bounds(steps[cases.BARE], world_size, dtype))
    tolerance = rounds.BF16 if options.bf16_wire else rounds.FP32
    reference = cases.FP32_WIRE if options.bf16_wire else REFERENCE

    def check() -> None:
        if reference in steps:  # else its failure is the figure's reason
            checked = {name: s for name, s in steps.items() if not name.startswith(cases.BARE)}
            rounds.check_gradients(checked, reference, samples, tolerance)

    rounds.interleave(steps, warm_up_rounds, timed_rounds, progress, samples, check)
    samples.more["wire_bytes"] = cases.wire_bytes(wrapped[0])
    return samples


def add_torch(
    steps: dict[str, Step],
    torch_cases: dict[str, cases.TorchCase],
    base: nn.Module,
    make_step: Callable[[nn.Module], Step],
    samples: Samples,
    progress: Callable[[], None],
) -> None:
    """Adds torch's cases to `steps`, each run once; notes those that fail."""
    for name, case in torch_cases.items():
        try:
            step = make_step(cases.make_torch(copy.deepcopy(base), case))
            step.run()
        except Exception as error:
            samples.failed_peers[name] = f"{type(error).__name__}: {error}"
        else:
            steps[name if name == cases.FP32_WIRE else cases.TORCH + name] = step
        progress()


def training_step(module: nn.Module, x: torch.Tensor) -> Step:
    """Returns the step of a plain loop."""

    def run() -> None:
        module.zero_grad(set_to_none=True)
        module(x).sum().backward()

    return Step(run, list(module.parameters()), cases.settle_steps(module))


def _make_bounds(bare: Step, world_size: int, dtype: torch.dtype) -> dict[str, Step]:
    """The work that data parallelism cannot avoid: one scaled copy, one flat all-reduce."""
    gradients = [torch.randn_like(parameter) for parameter in bare.parameters]
    flat = torch.zeros(sum(gradient.numel() for gradient in gradients), dtype=dtype)
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
