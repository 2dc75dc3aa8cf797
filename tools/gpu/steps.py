"""Whole training steps as torch's CUDA allocator sees them: python -m tools.gpu.steps CASE FILE [--small] [--operators]

FILE gets a JSON object for each number of rows:

- `rows`; `base`: bytes allocated before the step; `peak_over_base`, `reserved_over_base`: the most in it, above that;
- `events`: `["a", bytes]` an allocation, `["f", index of the event that made it]`, and segments
  (`["segment_alloc", bytes]`, `segment_free`, `segment_map`, `segment_unmap`);
- `phases`: the index of the first event of forward, backward, the optimizer's step and zero_grad;
- `operators` (with --operators): `[operator, allocations, bytes kept, bytes beside, shapes, dtypes]` for each one that
  allocates: of its first eight tensors.

The first has `first_step` too: the events of the step that makes the optimizer's state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.sizer import models
from tools.gpu import big_models
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TENSORS = 8  # of an operator, whose shapes are kept
HISTORY = 1 << 20  # events
SEGMENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")


@dataclass(frozen=True)
class Case:
    """A model with its loss, a batch of so many rows, the optimizer, and the numbers of rows."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], torch.Tensor]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    rows: tuple[int, ...]
    optimizer: str = "AdamW"
    dtype: torch.dtype | None = None


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
}
_IMAGES, _WORDS = (1, 2, 3, 8, 16, 32, 64, 128), (1, 2, 3, 4, 8, 16, 32)


def _resnet(dtype: torch.dtype | None) -> Case:
    return Case(
        big_models.resnet50,
        lambda rows: torch.randn(rows, 3, 224, 224),
        big_models.image_loss,
        _IMAGES,
        "SGD, momentum",
        dtype,
    )


def _gpt(dtype: torch.dtype | None) -> Case:
    return Case(
        big_models.Gpt,
        lambda rows: torch.randint(50257, (rows, 513)),
        big_models.word_loss,
        _WORDS,
        "AdamW",
        dtype,
    )


def _small(case: models.Case) -> Case:
    rows = tuple(sorted({2, 3, 16, 64, 256, 1024, case.rows, 4 * case.rows, 16 * case.rows}))
    return Case(case.make, case.batch, models.loss, rows)


CASES = {
    "ResNet-50 fp32": _resnet(None),
    "ResNet-50 bf16": _resnet(torch.bfloat16),
    "GPT-2 fp32": _gpt(None),
    "GPT-2 bf16": _gpt(torch.bfloat16),
    **{name: _small(case) for name, case in models.CASES.items()},
}


class Operators(TorchDispatchMode):
    """What each operator that allocates keeps, and what it takes beside that."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before, count = torch.cuda.memory_allocated(), _allocations()
        torch.cuda.reset_peak_memory_stats()
        out = func(*args, **(kwargs or {}))
        taken = _allocations() - count
        if taken:
            after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            shapes = [list(t.shape) for t in tensors[:TENSORS]]
            dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors[:TENSORS]]
            beside = peak - max(before, after)
            self.rows.append([str(func), taken, after - before, beside, shapes, dtypes])
        return out


def _allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


class Steps:
    """A case's steps with batches of any number of rows."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self._case = case
        self._model = case.make().cuda()
        self._optimizer = OPTIMIZERS[case.optimizer](self._model.parameters())

    def phases(self, x: torch.Tensor) -> list[tuple[str, Callable[[], None]]]:
        """A step, phase by phase."""
        kept: list[torch.Tensor] = []

        def forward() -> None:
            dtype = self._case.dtype
            with contextlib.nullcontext() if dtype is None else torch.autocast("cuda", dtype):
                kept.append(self._case.loss(self._model, x))

        return [
            ("forward", forward),
            ("backward", lambda: kept.pop().backward()),
            ("optimizer", lambda: self._optimizer.step()),
            ("zero_grad", self._optimizer.zero_grad),
        ]

    def step(self, x: torch.Tensor) -> None:
        """A whole step."""
        for _, phase in self.phases(x):
            phase()

    def recorded(self, x: torch.Tensor) -> dict[str, Any]:
        """A step's peaks and events."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        history = torch.cuda.memory._record_memory_history
        history("all", context=None, stacks="python", max_entries=HISTORY, clear_history=True)
        counts = []
        try:
            for _, phase in self.phases(x):
                counts.append(len(_trace()))
                phase()
            torch.cuda.synchronize()
            trace = _trace()
        finally:
            history(None)
        peaks = {
            "peak_over_base": torch.cuda.max_memory_allocated() - base,
            "reserved_over_base": torch.cuda.max_memory_reserved() - reserved,
        }
        events, places = _events(trace)
        names = [name for name, _ in self.phases(x)]
        phases = dict(zip(names, (places[count] for count in counts), strict=True))
        return {"base": base, **peaks, "events": events, "phases": phases}

    def operators(self, x: torch.Tensor) -> list[list[Any]]:
        """A step's operators, backward's too."""
        with Operators() as found:
            self.step(x)
        return found.rows


def _trace() -> list[dict[str, Any]]:
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[torch.cuda.current_device()]


def _events(trace: list[dict[str, Any]]) -> tuple[list[list[Any]], list[int]]:
    """The events that are kept, and before each event of the trace, and at its end, how many of them there are."""
    made: dict[int, int] = {}
    events: list[list[Any]] = []
    places = []
    for event in trace:
        places.append(len(events))
        action = event["action"]
        if action == "alloc":
            made[event["addr"]] = len(events)
            events.append(["a", event["size"]])
        elif action == "free_completed" and event["addr"] in made:
            events.append(["f", made.pop(event["addr"])])
        elif action in SEGMENTS:
            events.append([action, event["size"]])
    return events, [*places, len(events)]


def record(case: Case, rows: tuple[int, ...], with_operators: bool) -> list[dict[str, Any]]:
    """The case's steps, by rows; those that do not fit are left out."""
    found: list[dict[str, Any]] = []
    steps = Steps(case)
    first = steps.recorded(case.batch(rows[0]).cuda())
    for count in rows:
        x = case.batch(count).cuda()
        try:
            for _ in range(2):  # what libraries take once
                steps.step(x)
            entry = {"rows": count, **steps.recorded(x)}
            if with_operators:
                entry["operators"] = steps.operators(x)
        except torch.OutOfMemoryError:
            break
        found.append(entry)
    if found:
        found[0]["first_step"] = first
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--operators", action="store_true")
    given = parser.parse_args()
    case = CASES[given.case]
    rows = case.rows[:3] if given.small else case.rows
    given.file.write_text(json.dumps(record(case, rows, given.operators), separators=(",", ":")))


if __name__ == "__main__":
    main()
    os._exit(0)
