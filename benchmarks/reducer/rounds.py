"""Interleaved rounds on one rank: the samples, the order of the cases, the check of their gradients."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Samples:
    """What one rank measured: seconds a step, by case, one a round."""

    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    # Torch cases that failed to be built or to run, and why.
    failed_peers: dict[str, str] = field(default_factory=dict)
    # Cases whose gradients differ from the reference, and by how much.
    wrong: dict[str, str] = field(default_factory=dict)
    absent_flags: list[str] = field(default_factory=list)
    parameters: int = 0
    gradient_bytes: int = 0
    # What else a figure reports.
    more: dict[str, Any] = field(default_factory=dict)

    def describe(self, module: nn.Module) -> None:
        """Notes the size of what is reduced."""
        parameters = list(module.parameters())
        self.parameters = len(parameters)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)


@dataclass
class Step:
    """A case: what is timed, and the parameters whose gradients it fills (none for a bound)."""

    run: Callable[[], None]
    parameters: list[nn.Parameter] = field(default_factory=list)
    settle_steps: int = 0  # before everything else, on its own: bucket sizes are still tried


@dataclass(frozen=True)
class Tolerance:
    """How far a gradient may lie from the reference; `atol` is a fraction of its largest value."""

    rtol: float = 1e-5
    atol: float = 1e-6


FP32 = Tolerance()
# Half a unit of bf16 is 2**-9. A rank's part carries its rounding of this step and, by error feedback,
# that of the one before; with two ranks whose parts may each be as large as their sum, and its own
# rounding, that is 5 halves.
BF16 = Tolerance(rtol=2**-9, atol=4 * 2**-9)


def interleave(
    steps: Mapping[str, Step],
    warm_up_rounds: int,
    rounds: int,
    progress: Callable[[], None],
    samples: Samples,
    check: Callable[[], None],
) -> None:
    """Runs every case once a round into `samples`; checks before the first and after the last."""
    for step in steps.values():
        for _ in range(step.settle_steps):
            timed(step.run)
            progress()
    for k in range(warm_up_rounds):
        _run_round(order(list(steps), k), steps, None)
        progress()
    check()
    gc.collect()
    gc.disable()
    for k in range(rounds):
        _run_round(order(list(steps), k), steps, samples)
        progress()
    gc.enable()
    check()


def order(names: list[str], k: int) -> list[str]:
    """The k-th round's order: each rotation forwards and then backwards, to change neighbours."""
    start = k // 2 % len(names)
    rotated = names[start:] + names[:start]
    return rotated[::-1] if k % 2 else rotated


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Runs behind a barrier; returns the seconds of wall time and of this rank's CPU time."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def _run_round(names: list[str], steps: Mapping[str, Step], samples: Samples | None) -> None:
    for name in names:
        wall, cpu = timed(steps[name].run)
        if samples is not None:
            samples.wall_s.setdefault(name, []).append(wall)
            samples.cpu_s.setdefault(name, []).append(cpu)


def check_gradients(
    steps: Mapping[str, Step], reference: str, samples: Samples, tolerance: Tolerance = FP32
) -> None:
    """Compares the gradients that the last step of each case left with those of `reference`.

    Notes in `samples.wrong` what differs. Raises RuntimeError for a reference without gradients.
    """
    expected = [p.grad for p in steps[reference].parameters]
    for name, step in steps.items():
        if name != reference and step.parameters and name not in samples.wrong:
            found = [p.grad for p in step.parameters]
            difference = differences(found, expected, tolerance)
            if difference is not None:
                samples.wrong[name] = f"differs from {reference}: {difference}"


def differences(
    found: Sequence[torch.Tensor | None],
    expected: Sequence[torch.Tensor | None],
    tolerance: Tolerance = FP32,
) -> str | None:
    """Returns how gradients differ from the expected, or None; None is expected to stay None."""
    scales = [float(gradient.abs().max()) for gradient in expected if gradient is not None]
    if not scales or not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise RuntimeError(
            "the reference's gradients are missing, zero or not finite: nothing to compare with"
        )
    if len(found) != len(expected):
        return f"has {len(found)} parameters, not {len(expected)}"
    for k, (gradient, other) in enumerate(zip(found, expected, strict=True)):
        difference = _difference(gradient, other, tolerance)
        if difference is not None:
            return f"gradient of parameter {k}: {difference}"
    return None


def _difference(
    gradient: torch.Tensor | None, expected: torch.Tensor | None, tolerance: Tolerance
) -> str | None:
    if expected is None:
        return None if gradient is None else "is there, where no rank used the parameter"
    if gradient is None:
        return "missing"
    # Most are bit-equal, and allclose costs far more.
    if torch.equal(gradient, expected):
        return None
    scale = float(expected.abs().max())
    if torch.allclose(gradient, expected, rtol=tolerance.rtol, atol=tolerance.atol * scale):
        return None
    return f"differs by {float((gradient - expected).abs().max()) / scale:.2g} of its largest value"
