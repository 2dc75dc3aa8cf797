"""Memory runs out in each place of a step: a retry finds the bytes that the first try found, and draws its numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tools.gpu.check import Check, check
from tools.gpu.device import MIB, room, same_bits, settle
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 512, 256
ROW_BYTES = MIB // 2  # of the work memory that runs out: whole it takes 256 MiB
ROOM = 96 * MIB
PLACES = ("forward", "backward", "recomputation", "AMP")


class Work(torch.autograd.Function):
    """Takes memory in proportion to the rows, in forward or in backward, and gives it back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: str) -> torch.Tensor:
        ctx.place = place
        again = torch._C._current_graph_task_id() != -1  # recomputed in a backward
        if place in ("forward", "AMP") or (place == "recomputation" and again):
            _take(len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.place == "backward":
            _take(len(gradients[0]))
        return gradients[0], None


def _take(rows: int) -> None:
    torch.empty(rows * ROW_BYTES, dtype=torch.uint8, device="cuda")


class Net(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.drop = nn.Dropout(0.5)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        # What comes after it needs it: a recomputation ends with the last value that the backward needs.
        out: torch.Tensor = self.drop(torch.relu(Work.apply(self.first(x), self.place)))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (
            checkpoint(self.block, x, use_reentrant=False)
            if self.place == "recomputation"
            else self.block(x)
        )
        out: torch.Tensor = self.last(x)
        return out


@dataclass
class Step:
    """What a step did: bytes in use at each try's entry, the last try's dropout, gradients, random state."""

    entries: list[int] = field(default_factory=list)
    dropped: list[torch.Tensor] = field(default_factory=list)
    outcome: Any = None
    gradients: list[torch.Tensor] = field(default_factory=list)
    random_state: torch.Tensor | None = None


def run(small: bool) -> Iterator[Check]:
    """Yields two checks for each place, and the largest difference in bytes between a retry's entry and the first."""
    worst = 0
    for place in PLACES:
        bytes, checks = _in(place)
        worst = max(worst, bytes)
        yield from checks
    yield check("retry bytes", worst == 0, f"{worst} bytes at most", worst)


def _in(place: str) -> tuple[int, list[Check]]:
    torch.manual_seed(0)
    model = Net(place).cuda()
    fresh = copy.deepcopy(model)
    batch = (torch.randn(ROWS, WIDTH, device="cuda"), torch.arange(ROWS))
    for split in ([ROWS], [ROWS // 4] * 4):  # what libraries take once, for each of their kernels
        _step(model, place, batch, split)
    with room(ROOM):
        first = _step(model, place, batch)
    same = _step(fresh, place, batch, split=first.outcome.split)
    left = max(abs(entry - first.entries[0]) for entry in first.entries)
    equal = (
        first.outcome.loss == same.outcome.loss
        and torch.equal(_state(first), _state(same))
        and all(torch.equal(a, b) for a, b in zip(first.dropped, same.dropped, strict=True))
        and all(same_bits(a, b) for a, b in zip(first.gradients, same.gradients, strict=True))
    )
    split = f"{first.outcome.retries} retries, {first.outcome.pieces} pieces"
    retried = first.outcome.retries > 0 and len(first.entries) == first.outcome.retries + 1
    return left, [
        check(f"{place}: bytes at entry", retried and left == 0, f"{left} more; {split}", left),
        check(f"{place}: dropout and gradients", equal and same.outcome.retries == 0, split),
    ]


def _state(step: Step) -> torch.Tensor:
    assert step.random_state is not None
    return step.random_state


def _step(
    model: Net,
    place: str,
    batch: tuple[torch.Tensor, torch.Tensor],
    split: list[int] | None = None,
) -> Step:
    import brimful

    made = Step()
    handle = model.drop.register_forward_hook(
        lambda module, inputs, output: made.dropped.append((output == 0).cpu())
    )
    scaler = torch.amp.GradScaler("cuda") if place == "AMP" else None
    sizer = brimful.BatchSizer(model, scaler=scaler)
    settle()
    torch.manual_seed(7)
    made.outcome = sizer.step(batch, _loss_fn(made, place == "AMP"), split=split)
    handle.remove()
    made.random_state = torch.cuda.get_rng_state()
    made.gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return made


def _loss_fn(made: Step, amp: bool) -> Callable[[Any, Any], torch.Tensor]:
    def loss_fn(model: nn.Module, piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, ids = piece
        if int(ids[0]) == 0:  # a try begins
            made.entries.append(torch.cuda.memory_allocated())
            made.dropped.clear()
        with torch.autocast("cuda", torch.float16, enabled=amp):
            return model(x).float().square().mean()

    return loss_fn
