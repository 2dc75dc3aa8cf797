"""Steps that have no room and run on the ladder's rungs, against the same step with room: bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import SIMULATED, room, same_bits, settle
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

LADDERS: dict[str, Any] = {
    "recompute": ["split", "recompute"],
    "offload": ["split", "offload"],
    "auto": "auto",
}
SHARE = 0.7  # of what the step takes
# Words of the only row: on a GPU the workspaces of cuBLAS are small beside what they take.
LENGTH = 512 if SIMULATED else 2048
STEPS = 2


def run(small: bool) -> Iterator[Check]:
    """Yields a check for each ladder: gradients have the same bits, and something was recomputed or offloaded."""
    with sdpa_kernel(SDPBackend.MATH):  # the others' backward does not repeat bit by bit
        yield from _rungs()


def _rungs() -> Iterator[Check]:
    x = torch.randn(1, LENGTH, 128, device="cuda")
    steps = [_step(_net(), x, "split", None) for _ in range(2)]
    gradients, _, taken = steps[0]
    if not _equal(gradients, steps[1][0]):
        yield skipped("rungs", "the step with room does not repeat bit by bit here")
        return
    for name, ladder in LADDERS.items():
        found, rungs, _ = _step(_net(), x, ladder, int(SHARE * taken))
        yield check(name, _equal(found, gradients) and bool(rungs), rungs or "had room")


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(6)]
    return nn.Sequential(*layers).cuda()


def _step(
    model: nn.Module, x: torch.Tensor, ladder: Any, bytes: int | None
) -> tuple[list[torch.Tensor], str, int]:
    """Gradients of the last of some steps, its rungs, and the bytes that it took."""
    import brimful

    sizer = brimful.BatchSizer(model, ladder=ladder)
    rungs, taken = "", 0
    with room(1 << 40 if bytes is None else bytes):
        for _ in range(STEPS):
            model.zero_grad()
            torch.manual_seed(1)
            used = torch.cuda.memory_allocated()
            outcome = sizer.step(x, lambda m, piece: m(piece).square().mean(), split=[1])
            taken = int(outcome.peak_bytes) - used
            found = outcome.rungs
            rungs = str(found) if found and (found.recomputed or found.offloaded) else ""
    gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    settle()
    return gradients, rungs, taken


def _equal(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(these, those, strict=True))
