"""Two ranks over NCCL, and a pipeline of two stages, on two devices: their gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tools.gpu import two_ranks
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import relative_difference
from torch import nn


def run(small: bool) -> Iterator[Check]:
    """Yields the checks of two ranks, and the difference of two stages from the whole model."""
    if torch.cuda.device_count() < 2:
        yield skipped("two devices", f"{torch.cuda.device_count()} is here")
        return
    yield from two_ranks.compare("nccl", has_own_device=True)
    yield _stages()


def _stages() -> Check:
    import brimful

    whole, model, x = two_ranks.net().cuda(), two_ranks.net(), two_ranks.batch()
    two_ranks.loss(whole, x.cuda()).backward()
    halves = [model[:4].to("cuda:0"), model[4:].to("cuda:1")]
    pipe = brimful.Pipeline(halves, microbatches=4, loss_fn=nn.functional.mse_loss)
    pipe.step(x, x.to("cuda:1"))
    ours, right = ([g.cpu() for g in two_ranks.gradients(m)] for m in (model, whole))
    worst = relative_difference(ours, right)
    words = f"differ by {worst:.1e} of the largest value"
    return check("a pipeline of two stages", worst < 1e-10, words, worst)
