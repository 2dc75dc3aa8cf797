"""Steps for callgrind to count: `python -m benchmarks.ladder.counted MODEL LADDER STEPS`."""

from __future__ import annotations

import ctypes
import sys

import torch
import torch.nn.functional as F

import brimful
from benchmarks import callgrind
from benchmarks.ladder import idle
from benchmarks.probes import cost


def main(name: str, ladder: str, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, draw = cost.MODELS[name]
    model, batch = make(), draw()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sizer = brimful.BatchSizer(model, optimizer, predict=False, ladder=ladder)

    def step() -> None:
        sizer.step(batch, lambda model, piece: F.cross_entropy(model(piece[0]), piece[1]))
        optimizer.step()
        optimizer.zero_grad()

    library = ctypes.PyDLL(str(callgrind.find_program(cost.COUNTED_LIBRARY)))
    for _ in range(idle.WARM_UP_STEPS):
        step()
    callgrind.start_counting()
    step()
    counted = ctypes.PYFUNCTYPE(None)(step)
    for _ in range(steps):
        library.brimful_bench_run(counted)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
