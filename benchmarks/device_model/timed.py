"""Times steps here and there in turn: python -m benchmarks.device_model.timed MODEL ROWS ROUNDS

A step is forward and backward. The last line, in JSON: {"cuda": seconds of each round, "cpu": those of the same}.
In a process on the device without arithmetic the CPU computes as ever, so that both run in one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.device_model import child


def _stepper(name: str, rows: int, device: str) -> Callable[[], float]:
    make, batch, loss = child.case_of(name)
    torch.manual_seed(0)
    model = make().to(device)
    x = batch(rows).to(device)

    def step() -> float:
        began = time.perf_counter()
        loss(model, x).backward()
        torch.cuda.synchronize()
        taken = time.perf_counter() - began
        model.zero_grad()
        return taken

    return step


def main() -> None:
    name, rows, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    steps = {device: _stepper(name, rows, device) for device in ("cuda", "cpu")}
    taken: dict[str, list[float]] = {device: [] for device in steps}
    for number in range(rounds + 1):
        for device in sorted(steps, reverse=number % 2 == 0):
            seconds = steps[device]()
            if number > 0:  # the first one warms up
                taken[device].append(seconds)
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
