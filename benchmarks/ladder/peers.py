"""The smallest limit and the time at equal limits: against checkpoints by hand, and torch.compile's memory budget."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import common, intervals
from benchmarks.ladder import cases, plans
from benchmarks.sizer import models

IDS = ("ladder.peers", "ladder.peers_time")
ROUNDS, QUICK_ROUNDS = 30, 2
LENGTH = 512
#: torch.compile takes half a minute for a fraction: a smaller decoder, and few of them.
COMPILED_BLOCKS = 3
FRACTIONS = (0.0, 0.3, 0.6, 1.0)
BACKENDS = ("inductor", "aot_eager_decomp_partition")
QUICK_FRACTIONS, QUICK_BACKENDS = (0.5,), BACKENDS[1:]
BY_HAND = "checkpoints by hand"
STEPS = 3
CLOSE = 1e-3  # of the largest element: kernels of inductor add in another order


class ByHand(cases.Blocks):
    """Every block under torch's checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = self.mask(x), self.words(x)
        for block in self.blocks:
            y = checkpoint(
                lambda z, block=block: block(z, src_mask=mask, is_causal=self.causal),
                y,
                use_reentrant=False,
            )
        out: torch.Tensor = self.head(y)
        return out


class UNetByHand(cases.DeepUNet):
    """Every level under torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        for level in self.levels():
            level.forward = _checkpointed(level.forward)

    def levels(self) -> list[nn.Module]:
        return [*self.down, self.middle, *self.up]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@dataclass
class Way:
    """A model in training on one sample, by a peer."""

    name: str
    forward: Callable[[torch.Tensor], torch.Tensor]
    model: nn.Module

    def step(self, sample: torch.Tensor) -> None:
        self.forward(sample).square().mean().backward()


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields our smallest limit over that of each peer, and our time at its smallest limit over its: the worst."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    words = cases.CASES["encoder"].draw
    found: dict[str, dict[str, Any]] = {}
    found["decoder of 12"] = _compare(
        lambda: cases.Blocks(True), words(1, LENGTH), lambda: [_by_hand(ByHand(True))], rounds
    )
    found["deep U-Net"] = _compare(
        cases.DeepUNet, torch.randn(1, 3, 128, 128), lambda: [_by_hand(UNetByHand())], rounds
    )
    fractions = QUICK_FRACTIONS if quick else FRACTIONS
    backends = QUICK_BACKENDS if quick else BACKENDS
    found[f"decoder of {COMPILED_BLOCKS}"] = _compare(
        lambda: cases.Blocks(True, COMPILED_BLOCKS),
        words(1, LENGTH),
        lambda: (_compiled(backend, each) for backend in backends for each in fractions),
        rounds,
    )
    conditions = common.machine_conditions()
    conditions.update(models=found, length=LENGTH, rows=1)
    for figure_id, of_peer in zip(IDS, ("limit", "time"), strict=True):
        pairs = [
            (model, peer, row[of_peer])
            for model, rows in found.items()
            for peer, row in rows["peers"].items()
            if of_peer in row
        ]
        model, peer, worst = max(pairs, key=lambda pair: float(pair[2]["value"]))
        conditions = {**conditions, "worst": f"{model}, {peer}"}
        if of_peer == "time":
            conditions["cpu_time"] = found[model]["peers"][peer]["cpu_time"]
        print(f"\n{figure_id}: {worst} ({model}, {peer})")
        yield common.Figure(
            figure_id,
            "ratio",
            worst["value"],
            worst["low"],
            worst["high"],
            peer,
            rounds if of_peer == "time" else 1,
            conditions,
        )


def _by_hand(model: nn.Module) -> Way:
    return Way(BY_HAND, model, model)


def _compiled(backend: str, fraction: float) -> Way:
    """It is gone when the next one is compiled."""
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    model = cases.Blocks(True, COMPILED_BLOCKS)
    with functorch.patch(activation_memory_budget=fraction):
        compiled = torch.compile(model, backend=backend, dynamic=False)
        way = Way(f"{backend}, budget {fraction:g}", compiled, model)
        way.step(torch.ones(1, LENGTH, dtype=torch.long))  # it is compiled within the patch
    plans.clear(model)
    return way


def _compare(
    make: Callable[[], nn.Module],
    sample: torch.Tensor,
    make_peers: Callable[[], Iterable[Way]],
    rounds: int,
) -> dict[str, Any]:
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = make()
    least = _least_limit(model, sample)
    found: dict[str, Any] = {"least_limit_bytes": least, "peers": {}}
    for peer in make_peers():
        peer.model.load_state_dict(model.state_dict())
        peak = _peak(peer, sample)
        error = _error(model, peer, sample)
        if error > CLOSE:
            raise RuntimeError(
                f"the gradients of a peer differ (peer: {peer.name}, error: {error})"
            )
        row = {"limit_bytes": peak, "error": error, "limit": _exact(least / peak)}
        row.update(_race(model, peer, sample, peak, rounds))
        found["peers"][peer.name] = row
        print(f"  {peer.name}: {row}", flush=True)
    return found


def _exact(value: float) -> dict[str, float]:
    return {"value": value, "low": value, "high": value}


def _peak(peer: Way, sample: torch.Tensor) -> int:
    """The limit under which the peer's step runs: it takes as much whatever there is."""
    from brimful import _C

    for _ in range(2):
        plans.clear(peer.model)
        gc.collect()
        before = plans.used_bytes()
        with _C._PeakScope("cpu") as scope:
            peer.step(sample)
        peak = int(scope.peak_bytes) - before
    plans.clear(peer.model)
    return peak


def _error(model: nn.Module, peer: Way, sample: torch.Tensor) -> float:
    plans.clear(model)
    models.loss(model, sample).backward()
    peer.step(sample)
    pairs = list(zip(model.parameters(), peer.model.parameters(), strict=True))
    largest = max(float(p.grad.abs().max()) for p, _ in pairs if p.grad is not None)
    found = 0.0
    for mine, other in pairs:
        assert mine.grad is not None and other.grad is not None
        found = max(found, float((mine.grad - other.grad).abs().max()) / largest)
    plans.clear(model)
    plans.clear(peer.model)
    return found


def _sizer(model: nn.Module) -> Any:
    import brimful

    return brimful.BatchSizer(model, predict=False, ladder="auto", batch_norm="freeze")


def _runs(model: nn.Module, sample: torch.Tensor, limit: int) -> Any:
    """The sizer and its last outcome under the limit; None where no rung is enough."""
    import brimful

    sizer = _sizer(model)
    plans.clear(model)
    try:
        with plans.room(limit):
            for _ in range(STEPS):
                outcome = sizer.step(sample, models.loss)
                plans.clear(model)
    except brimful.BatchTooLarge:
        return None
    finally:
        plans.clear(model)
    return sizer, outcome


def _least_limit(model: nn.Module, sample: torch.Tensor) -> int:
    enough = _peak(Way("", model, model), sample) + 2**16
    too_little = 0
    while enough - too_little > enough // 200:
        middle = (enough + too_little) // 2
        if _runs(model, sample, middle) is None:
            too_little = middle
        else:
            enough = middle
    return enough


def _race(
    model: nn.Module, peer: Way, sample: torch.Tensor, limit: int, rounds: int
) -> dict[str, Any]:
    """Ours under the peer's smallest limit, and the peer, in turn."""
    run = _runs(model, sample, limit)
    if run is None:
        return {"ours": "does not fit"}
    sizer, outcome = run
    samples: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    retries = 0
    for number in range(-2, rounds):
        for way in ("ours", "peer") if number % 2 else ("peer", "ours"):
            with plans.room(limit if way == "ours" else 2**50):
                began = time.perf_counter(), time.process_time()
                if way == "ours":
                    outcome = sizer.step(sample, models.loss)
                    retries += outcome.retries
                else:
                    peer.step(sample)
                took = time.perf_counter() - began[0], time.process_time() - began[1]
            plans.clear(model)
            plans.clear(peer.model)
            if number >= 0:
                samples[way].append(took)
    wall, cpu = (
        intervals.median_ratio([t[k] for t in samples["ours"]], [t[k] for t in samples["peer"]])
        for k in (0, 1)
    )
    return {
        "time": common.interval_dict(wall),
        "cpu_time": common.interval_dict(cpu),
        "peer_s": intervals.median([t[0] for t in samples["peer"]]),
        "ours": plans.describe(outcome.rungs)[:300],
        "retries": retries,
    }
