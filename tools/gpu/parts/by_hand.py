"""A sizer's step beside the same loop by hand: a batch that fits in pieces alone, and a model whose step is short."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from tools.gpu import big_models
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import MIB, NEEDS_HARDWARE, SIMULATED, room, settle
from torch import nn

ROWS, LENGTH = 64, 512
MICROBATCHES = (8, 16, 32)  # rows, by hand
SETTLE_STEPS = 5
SLOWER, DRIFT = 1.03, 0.03
ROUNDS = 7

Step = Callable[[], None]


def run(small: bool) -> Iterator[Check]:
    """Yields the times against the best by hand, what by hand drifted meanwhile, and the short step's ratio."""
    yield from _in_pieces(small)
    settle()
    yield from _short_step()


def _in_pieces(small: bool) -> Iterator[Check]:
    import brimful

    torch.manual_seed(0)
    rows, length = (8, 16) if small else (ROWS, LENGTH)
    words = 300 if small else 50257
    model = (big_models.Gpt(words, 32, 64, 2) if small else big_models.Gpt()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not SIMULATED)
    batch = torch.randint(words, (rows, length + 1), device="cuda")

    def loss_fn(model: nn.Module, piece: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return big_models.word_loss(model, piece)

    def by_hand(size: int) -> Step:
        def step() -> None:
            for piece in batch.split(size):
                (loss_fn(model, piece) * (len(piece) / rows)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    sizes = [size for size in MICROBATCHES if size <= rows]
    hand = {size: by_hand(size) for size in sizes}
    for step in hand.values():
        step()
    settle()
    torch.cuda.reset_peak_memory_stats()
    hand[sizes[-1]]()
    taken = torch.cuda.max_memory_reserved() - torch.cuda.memory_allocated()
    sizer = brimful.BatchSizer(model, optimizer)
    pieces = []

    def step() -> None:
        pieces.append(sizer.step(batch, loss_fn).pieces)
        optimizer.step()
        optimizer.zero_grad()

    with room(int(1.05 * taken) + 64 * MIB):
        first = {size: _median_s(hand[size]) for size in sizes}
        for _ in range(SETTLE_STEPS):
            step()
        ours = _median_s(step)
        again = {size: _median_s(hand[size]) for size in sizes}
    best = min(first, key=first.__getitem__)
    drift = again[best] / first[best] - 1
    ratio = ours / statistics.mean((first[best], again[best]))
    said = ", ".join(f"{size} rows {1e3 * first[size]:.0f} ms" for size in sizes)
    words = f"{1e3 * ours:.0f} ms in {pieces[-1]} pieces; by hand {said}; drift {drift:+.1%}"
    if SIMULATED:
        yield skipped("a batch in pieces", NEEDS_HARDWARE)
    else:
        good = ratio <= SLOWER or abs(drift) > DRIFT
        yield check(
            "a batch in pieces", good, f"{ratio:.3f} of by hand: {words}", ratio, drift=drift
        )


def _short_step() -> Iterator[Check]:
    """Reported, not judged: of a loop that reads its loss, and of one that reads nothing."""
    import brimful

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256), nn.ReLU()] * 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(64, 256, device="cuda")
    sizer = brimful.BatchSizer(model, optimizer)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x).square().mean()
        return out

    def plain(is_read: bool) -> Step:
        def step() -> None:
            loss = loss_fn(model, x)
            loss.backward()
            with contextlib.nullcontext():
                if is_read:
                    loss.item()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def sized() -> None:
        sizer.step(x, loss_fn)
        optimizer.step()
        optimizer.zero_grad()

    steps = {"sizer": sized, "reads its loss": plain(True), "reads nothing": plain(False)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        _seconds(step, 20)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(_seconds(step, 20))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    words = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in medians.items())
    if SIMULATED:
        yield skipped("a short step", NEEDS_HARDWARE)
    else:
        value = medians["sizer"] / medians["reads its loss"]
        yield check(
            "a short step", True, f"{words}: {value:.3f} of the one that reads its loss", value
        )


def _median_s(step: Step) -> float:
    return statistics.median(_seconds(step, 1) for _ in range(5))


def _seconds(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count
