"""How much more memory than the bare module a step of ours takes, in buckets; exact."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks import common, intervals, ranks
from benchmarks.reducer import cases, report, rounds
from benchmarks.reducer.report import Conditions, Request

IDS = ("reducer.extra_buckets",)
WORLD_SIZE = 2
PIECES = 4
MIN_BUCKETS = 10
STEPS = 4  # the peak is that of the last; torch has its final buckets from the second on


@dataclass(frozen=True)
class Case:
    """A model and the size of its buckets; caps that parameters fill without overshooting."""

    model: cases.Model
    bucket_mb: float


CASES = {
    "small": Case(cases.Model(layers=400, width=64, batch=8, bias=True), 0.5),
    "big": Case(cases.Model(layers=12, width=1024, batch=8, bias=False), 4),
}


@dataclass
class Peaks:
    """Peak bytes of one rank's step, by case; what was in use before the case is taken off."""

    peaks: dict[str, int] = field(default_factory=dict)
    buckets: int = 0
    wrong: str | None = None


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Yields the largest number of extra buckets over models, pieces and kinds of zero_grad."""
    ours = request.factory()
    conditions.update(
        ours=ours,
        world_size=WORLD_SIZE,
        backend="gloo",
        value="the largest over the models and (peak - peak of the bare module) / bucket",
        pieces=PIECES,
        models={},
    )
    extra: dict[str, float] = {}
    for name, case in CASES.items():
        by_rank = ranks.run_ranks(WORLD_SIZE, work, case, ours, stall_s=request.stall_s)
        described = _describe(name, case, by_rank)
        conditions["models"][name] = described
        extra.update({f"{name}, {key}": value for key, value in described["extra_buckets"].items()})
    worst = max(extra, key=extra.__getitem__)
    conditions["worst"] = worst
    print("\nreducer.extra_buckets: above the bare module, in buckets")
    for key, value in extra.items():
        report.print_line(key, f"{value:.3f}{'  <- largest' if key == worst else ''}")
    exact = intervals.Interval(extra[worst], extra[worst], extra[worst])
    peer = "bare module, set_to_none=False"
    yield report.figure_of("reducer.extra_buckets", exact, 1, conditions, peer)


def _describe(name: str, case: Case, by_rank: list[Peaks]) -> dict[str, Any]:
    for rank, found in enumerate(by_rank):
        if found.wrong is not None:
            raise report.Unmeasured(f"rank {rank}, model {name}: {found.wrong}")
        if found.buckets < MIN_BUCKETS:
            raise report.Unmeasured(
                f"too few buckets to tell (model: {name}, buckets: {found.buckets}, "
                f"needed: {MIN_BUCKETS})"
            )
    size = case.bucket_mb * 2**20
    peaks = {key: max(p.peaks[key] for p in by_rank) for key in by_rank[0].peaks}
    extra = {
        key: (peak - peaks[f"bare, {key.rsplit(', ', 1)[-1]}"]) / size
        for key, peak in peaks.items()
        if not key.startswith("bare")
    }
    return {
        "model": case.model.text,
        "batch_per_rank": case.model.batch,
        "bucket_bytes": int(size),
        "buckets": by_rank[0].buckets,
        "peak_bytes": peaks,
        "extra_buckets": {key: v for key, v in extra.items() if not key.startswith(cases.TORCH)},
        "extra_buckets_of_torch": {k: v for k, v in extra.items() if k.startswith(cases.TORCH)},
    }


def work(rank: int, world_size: int, progress: Callable[[], None], case: Case, ours: str) -> Peaks:
    """Measures every case on one rank, one after the other; each starts from the same memory."""
    warnings.filterwarnings("ignore")
    import brimful  # before any tensor: its allocator counts what comes after

    found = Peaks()
    base, x = case.model.make(), case.model.data(rank)
    make_ours = cases.resolve(ours)

    def wrap(module: nn.Module) -> nn.Module:
        # Sizes as given: the figure counts buckets of a known size.
        wrapped = make_ours(module, **cases.fixed_plan(case.bucket_mb))
        reducer = getattr(wrapped, "reducer", None)
        found.buckets = getattr(reducer, "buckets", 0)
        return wrapped

    def torch_ddp(view: bool) -> Callable[[nn.Module], nn.Module]:
        flags = {"gradient_as_bucket_view": view, "bucket_cap_mb": case.bucket_mb}
        return lambda module: cases.make_torch(module, cases.TorchCase(flags))

    def plain(none: bool, pieces: int = 1) -> Callable[[nn.Module], Callable[[], None]]:
        return lambda module: _plain_step(module, x, none, pieces)

    def sized(none: bool) -> Callable[[nn.Module], Callable[[], None]]:
        return lambda module: _sizer_step(module, x, none)

    one, several = "1 piece", f"{PIECES} pieces"
    measured = {
        f"bare, {one}": (lambda module: module, plain(none=False)),
        f"bare, {several}": (lambda module: module, plain(none=False, pieces=PIECES)),
        f"set_to_none=True, {one}": (wrap, plain(none=True)),
        f"set_to_none=False, {one}": (wrap, plain(none=False)),
        f"set_to_none=True, {several}": (wrap, sized(none=True)),
        f"torch:default, {one}": (torch_ddp(view=False), plain(none=True)),
        f"torch:view, {one}": (torch_ddp(view=True), plain(none=False)),
        f"torch:view, {several}": (torch_ddp(view=True), plain(none=False, pieces=PIECES)),
    }
    # By the number of pieces: products of other shapes round otherwise, through 400 layers by 2e-5.
    references: dict[str, list[torch.Tensor | None]] = {}
    for name, (make, step_of) in reversed(measured.items()):  # torch first: the reference
        gc.collect()
        before = brimful.memory.stats("cpu").used_bytes
        module = make(copy.deepcopy(base))
        run = step_of(module)
        for _ in range(STEPS):
            brimful.memory.reset_peak("cpu")
            run()
            progress()
        found.peaks[name] = brimful.memory.stats("cpu").peak_bytes - before
        gradients = [p.grad for p in module.parameters()]
        in_pieces = name.rpartition(", ")[2]
        if in_pieces not in references:
            references[in_pieces] = [g if g is None else g.clone() for g in gradients]
        elif not name.startswith("bare"):
            difference = rounds.differences(gradients, references[in_pieces])
            if difference is not None and found.wrong is None:
                found.wrong = f"{name} differs from torch:view, {in_pieces}: {difference}"
        del module, run, gradients
    return found


def _plain_step(module: nn.Module, x: torch.Tensor, none: bool, pieces: int) -> Callable[[], None]:
    def run() -> None:
        module.zero_grad(set_to_none=none)
        *earlier, last = x.chunk(pieces)
        with getattr(module, "no_sync", nullcontext)():
            for piece in earlier:
                (_loss(module, piece) * (len(piece) / len(x))).backward()
        (_loss(module, last) * (len(last) / len(x))).backward()

    return run


def _sizer_step(module: nn.Module, x: torch.Tensor, none: bool) -> Callable[[], None]:
    import brimful

    sizer = brimful.BatchSizer(module)
    split = [len(piece) for piece in x.chunk(PIECES)]

    def run() -> None:
        module.zero_grad(set_to_none=none)
        sizer.step(x, _loss, split=split)

    return run


def _loss(module: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = module(x).sum(1).mean()
    return loss
