"""brimful's GradScaler of C++ step by step against torch's, with gradients that overflow now and then."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tools.gpu.check import Check, check
from tools.gpu.device import same_bits

STEPS = 60
SIZES = (7, 300, 4096)


def run(small: bool) -> Iterator[Check]:
    """Yields whether scale, steps taken and parameters are equal in every step."""
    from brimful import _C

    options = {"init_scale": 2.0**12, "growth_interval": 5}
    theirs, ours = torch.amp.GradScaler("cuda", **options), _C._GradScaler(**options)
    torch.manual_seed(0)
    one = [torch.randn(size, device="cuda", requires_grad=True) for size in SIZES]
    two = [p.detach().clone().requires_grad_() for p in one]
    first, second = (torch.optim.SGD(p, lr=0.01) for p in (one, two))
    different, overflows = [], 0
    for step in range(STEPS):
        factor = float("inf") if step % 13 == 7 else 1.0
        theirs.scale(_loss(one) * factor).backward()
        ours.scale(_loss(two) * factor).backward()
        theirs.step(first)
        took = ours.step(id(second), two, second.step)
        overflows += not took
        theirs.update()
        ours.update()
        first.zero_grad()
        second.zero_grad()
        state = {name: float(value) for name, value in ours.state().items()}
        same = all(same_bits(a, b) for a, b in zip(one, two, strict=True))
        if not same or any(float(theirs.state_dict()[k]) != v for k, v in state.items()):
            different.append(step)
    words = f"{STEPS} steps, {overflows} left out, different: {different}"
    yield check("GradScaler of C++ and torch's", not different and overflows > 2, words)


def _loss(parameters: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([p.square().mean() for p in parameters]).sum()
