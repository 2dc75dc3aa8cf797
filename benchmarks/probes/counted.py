"""Steps for callgrind to count: `python -m benchmarks.probes.counted MODEL without|with|"by module" STEPS`."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext

import torch

import brimful
from benchmarks import callgrind
from benchmarks.probes import cost


def main(name: str, way: str, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, batch = cost.MODELS[name]
    step = cost.step_of(make(), batch)
    library = ctypes.PyDLL(str(callgrind.find_program(cost.COUNTED_LIBRARY)))
    ways = {cost.WITH: brimful.memory.track, cost.BY_MODULE: cost.by_module}
    with ways.get(way, nullcontext)():
        for _ in range(cost.WARM_UP_STEPS):
            step()
        counted = ctypes.PYFUNCTYPE(None)(step)
        for _ in range(steps):
            library.brimful_bench_run(counted)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
