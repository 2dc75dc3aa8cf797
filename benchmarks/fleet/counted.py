"""Steps for callgrind to count: `python -m benchmarks.fleet.counted plain|fleet STEPS`."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

import torch

import brimful
from benchmarks import callgrind
from benchmarks.sizer import overhead

LIBRARY = "brimful_bench_counted.so"
PLAIN, FLEET = "plain", "fleet"
RANKS = 8
WARM_UP_STEPS = 3


def steps_of(way: str) -> Callable[[], None]:
    """A step of the CNN under a sizer; with what a healthy fleet adds: rows, shares, a look at `stop`."""
    model = overhead.Cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizer = brimful.BatchSizer(model, optimizer)
    batch = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    sampler = brimful.GlobalSampler(
        64 * RANKS * 1000, batch_size=64 * RANKS, rank=0, world_size=RANKS
    )
    places = iter(sampler)
    times = [100.0 + rank for rank in range(RANKS)]

    def plain() -> None:
        sizer.step(batch, lambda m, p: torch.nn.functional.cross_entropy(m(p[0]), p[1]))
        optimizer.step()
        optimizer.zero_grad()

    def fleet() -> None:
        next(places)
        outcome = sizer.step(batch, lambda m, p: torch.nn.functional.cross_entropy(m(p[0]), p[1]))
        sampler._core.note(times)  # of one process's own outcome there is one time
        for observe in sizer._observers:  # metrics that are off, once more than in `plain`
            observe(outcome)
        if outcome.stop:
            raise RuntimeError("stopped")
        optimizer.step()
        optimizer.zero_grad()

    if way == FLEET:
        brimful.stop_on(signal.SIGUSR1)
    return fleet if way == FLEET else plain


def main(way: str, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    step = steps_of(way)
    library = ctypes.PyDLL(str(callgrind.find_program(LIBRARY)))
    for _ in range(WARM_UP_STEPS):
        step()
    callgrind.start_counting()
    counted = ctypes.PYFUNCTYPE(None)(step)
    for _ in range(steps):
        library.brimful_bench_run(counted)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
