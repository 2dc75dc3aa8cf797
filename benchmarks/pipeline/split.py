"""What a split backward keeps between its halves, and what it costs, beside torch.distributed.pipelining's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import _backward

from benchmarks import common, intervals

IDS = ("pipeline.split_live", "pipeline.split_time")
WIDTH, HEADS, TOKENS, ROWS, BLOCKS = 128, 8, 128, 2, 2
WHOLE, OURS, TORCHS = "whole backward", "brimful", "torch.distributed.pipelining"
WAYS = (WHOLE, OURS, TORCHS)
ORDERS = tuple(itertools.permutations(WAYS))  # what ran before decides what the heap is like
WARM_UP = 6
ROUNDS, QUICK_ROUNDS = 240, 6


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, d // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / (d // HEADS) ** 0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, t, d))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Case:
    """A microbatch of a stage, with its backward in one of the three ways."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.value = torch.randn(ROWS, TOKENS, WIDTH)
        self.gradient = torch.randn(ROWS, TOKENS, WIDTH)

    def run(self, way: str, between: Callable[[str], None] = lambda _: None) -> None:
        """Runs forward and backward; `between` is called when each part has ended."""
        from brimful import _C

        x = self.value.detach().requires_grad_()
        y = self.module(x)
        between("forward")
        if way == OURS:
            result = _C._backward_input([y], [self.gradient], [x])
            result.take_input_gradients()
            del y
            between("input")
            result.run_weight()
        elif way == TORCHS:
            _, groups = _backward.stage_backward_input(
                [y], [self.gradient], [x], self.module.parameters()
            )
            x.grad = None
            del y, _
            between("input")
            _backward.stage_backward_weight(self.module.parameters(), groups)
        else:
            y.backward(self.gradient)
            x.grad = None
            del y
        between("end")

    def gradients(self) -> list[torch.Tensor]:
        """Returns the parameters' gradients, and empties them."""
        found = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.module.zero_grad()
        return found


def figures(quick: bool) -> Iterator[common.Figure]:
    """Yields both ratios."""
    case = Case()
    expected: list[torch.Tensor] = []
    for way in WAYS:
        case.run(way)
        found = case.gradients()
        expected = expected or found
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise AssertionError(f"other gradients than of the whole backward (way: {way})")
    model = {"blocks": BLOCKS, "width": WIDTH, "tokens": TOKENS, "rows": ROWS, "heads": HEADS}
    yield _live(case, common.machine_conditions() | {"model": model})
    yield _time(case, QUICK_ROUNDS if quick else ROUNDS, common.machine_conditions() | model)


def _live(case: Case, conditions: dict[str, Any]) -> common.Figure:
    """Bytes after the first half, of what neither the stage nor its neighbours hold; the same in every run."""
    import brimful

    stats = brimful.memory.stats
    live: dict[str, dict[str, int]] = {}
    for way in WAYS:
        live[way] = {}
        before = stats("cpu").used_bytes
        brimful.memory.reset_peak("cpu")
        case.run(
            way,
            lambda part, way=way, before=before: live[way].update(  # type: ignore[misc]
                {part: stats("cpu").used_bytes - before, f"{part}_peak": stats("cpu").peak_bytes}
            ),
        )
        for part in [name for name in live[way] if name.endswith("_peak")]:
            live[way][part] -= before
        case.gradients()
    conditions["bytes"] = live
    for way, parts in live.items():
        print(f"  {way:30s} " + "  ".join(f"{k} {v / 1e6:.2f} MB" for k, v in parts.items()))
    value = live[OURS]["input"] / live[TORCHS]["input"]
    return common.Figure(
        IDS[0], "ratio", value, value, value, TORCHS, rounds=1, conditions=conditions
    )


def _time(case: Case, rounds: int, conditions: dict[str, Any]) -> common.Figure:
    """Forward and both halves over forward and the whole backward."""
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(-WARM_UP, rounds):
        for way in ORDERS[number % len(ORDERS)]:
            began = time.perf_counter(), time.process_time()
            case.run(way)
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            case.gradients()
            if number >= 0:
                wall[way].append(took[0])
                cpu[way].append(took[1])
    ratios = {way: intervals.median_ratio(wall[way], wall[WHOLE]) for way in (OURS, TORCHS)}
    cpu_ratios = {way: intervals.median_ratio(cpu[way], cpu[WHOLE]) for way in (OURS, TORCHS)}
    conditions["cpu_time"] = common.interval_dict(cpu_ratios[OURS])
    conditions["torchs"] = common.interval_dict(ratios[TORCHS])
    conditions["torchs_cpu_time"] = common.interval_dict(cpu_ratios[TORCHS])
    conditions["seconds"] = {way: intervals.median(wall[way]) for way in WAYS}
    for way in WAYS:
        print(f"  {way:30s} {intervals.median(wall[way]) * 1e3:.2f} ms", end="")
        print("" if way == WHOLE else f"  {ratios[way].value:.3f}, CPU {cpu_ratios[way].value:.3f}")
    ours = ratios[OURS]
    return common.Figure(
        IDS[1],
        "ratio",
        ours.value,
        ours.low,
        ours.high,
        WHOLE,
        rounds=rounds,
        conditions=conditions,
    )
