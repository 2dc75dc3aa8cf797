"""`python -m benchmarks.cuda.replay_steps ROWS_DIVISOR ...`: steps on a CUDA device and in the model of its allocator.

One JSON line a step: its peaks, and those that the model has for its requests.
"""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.cuda.recorded import Recorded
from benchmarks.sizer import models

SETTINGS = {
    "default": "expandable_segments:False",
    "power2": "roundup_power2_divisions:4,max_split_size_mb:24,max_non_split_rounding_mb:22",
    "expandable": "expandable_segments:True",
}


def main(divisors: list[int]) -> None:
    for settings, text in SETTINGS.items():
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings(text)  # type: ignore[attr-defined]
        for name, case in models.CASES.items():
            torch.manual_seed(0)
            model = case.make().cuda()
            for divisor in divisors:
                batch = case.batch(case.rows // divisor).cuda()
                step = Recorded(lambda m=model, x=batch: models.loss(m, x).backward())  # type: ignore[misc]
                told = step.replay()
                allocated, reserved = step.peak()
                line = {
                    "case": f"{name}, {settings}, {len(batch)} rows",
                    "events": len(step.requests),
                    "different": len(step.differences()),
                    "allocated": max(moment[0] for moment in told) / allocated - 1,
                    "reserved": max(moment[1] for moment in told) / reserved - 1,
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main([int(divisor) for divisor in sys.argv[1:]])
