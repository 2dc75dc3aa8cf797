"""What brimful.summary says of a step, against the peak of one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tools.gpu.check import Check, check
from tools.gpu.device import SIMULATED, settle
from tools.gpu.racer import CASES, SMALL_CASES

ALLOWED = 0.01  # of the measured peak; of the predicted one it is reported


def run(small: bool) -> Iterator[Check]:
    """Yields a check for each model: the peak, and the one that was predicted from small batches."""
    import brimful

    for name in ("ResNet-50 fp32", "GPT-2 fp32"):
        case = (SMALL_CASES if small else CASES)[name]
        torch.manual_seed(0)
        model, x = case.make().cuda(), case.batch().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        found = brimful.summary(model, x, loss_fn=case.loss, optimizer=optimizer)
        for _ in range(2):
            settle()
            torch.cuda.reset_peak_memory_stats()
            case.loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated()
        error = found.peak_bytes / peak - 1
        words = f"{found.peak_bytes} bytes said, {peak} taken: {error:+.2%}"
        yield check(f"{name}: peak", SIMULATED or abs(error) <= ALLOWED, words, error)
        predicted = found.predicted_bytes
        words = "none" if predicted is None else f"{predicted} bytes: {predicted / peak - 1:+.2%}"
        yield check(
            f"{name}: predicted", True, words, None if predicted is None else predicted / peak - 1
        )
        del model, optimizer
        settle()
