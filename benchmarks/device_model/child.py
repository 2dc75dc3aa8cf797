"""Steps on a device, as its allocator saw them: python -m benchmarks.device_model.child, requests in JSON on stdin.

A request: {"model": "ResNet-50 fp32", "rows": [1, 2], "named": [1], "leave_out": ""}. For each number of rows a line
comes back:

- `rows`; `base`: bytes allocated before the step; `peak_over_base`, `reserved_over_base`: the most in it, above that;
- `events` as in tools/gpu/recorded;
- `operators`, for the sizes in `named`: each of torch's operators, after the number of allocations before it.

`leave_out` says which recorded workspaces are not known, so that no row proves itself: "size", those of this model at
the size that is measured; "model", those of this model.

The last line is {"done": model} or {"error": words}.

The procedure is that of the recorded steps: forward and backward after two such steps and an empty cache, at each size
and each model of a file after the others in one process: blocks of earlier ones decide which segments there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tools.gpu import big_models
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.sizer import models

SEGMENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
WARM_UP = 2

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


class Operators(TorchDispatchMode):
    """How many events there were when each operator began."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[tuple[int, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        stats = torch.cuda.memory_stats()
        self.names.append((stats["allocation.all.allocated"], str(func)))
        return func(*args, **(kwargs or {}))


def case_of(name: str) -> tuple[Callable[[], torch.nn.Module], Callable[[int], torch.Tensor], Loss]:
    """Returns what makes the model, what makes a batch of so many rows, and the loss."""
    if name.startswith("ResNet-50"):
        return (
            big_models.resnet50,
            lambda rows: torch.randn(rows, 3, 224, 224),
            big_models.image_loss,
        )
    if name.startswith("GPT-2"):
        return (
            big_models.Gpt,
            lambda rows: torch.randint(50257, (rows, 513)),
            big_models.word_loss,
        )
    case = models.CASES[name]
    return case.make, case.batch, models.loss


def events_of(trace: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns a trace of the allocator as the recorded steps have it."""
    made: dict[int, int] = {}
    events: list[list[Any]] = []
    for entry in trace:
        action = entry["action"]
        if action == "alloc":
            made[entry["addr"]] = len(events)
            events.append(["a", entry["size"]])
        elif action == "free_completed" and entry["addr"] in made:
            events.append(["f", made.pop(entry["addr"])])
        elif action in SEGMENTS:
            events.append([action, entry["size"]])
    return events


def leave_out(model: str, rows: int) -> None:
    """Uses the recorded workspaces without those of this model at this size; of all sizes if it is 0."""
    ctypes.CDLL("libcudnn.so.9").sim_cudnn_leave_out(model.encode(), ctypes.c_int64(rows))


def measure(
    name: str, sizes: list[int], named: list[int], left_out: str
) -> Iterator[dict[str, Any]]:
    """Yields what a step takes at each size."""
    make, batch, loss = case_of(name)
    torch.manual_seed(0)
    model = make().to("cuda")
    for rows in sizes:
        if left_out:
            leave_out(name, rows if left_out == "size" else 0)
        x = batch(rows).to("cuda")

        def step(model: torch.nn.Module = model, x: torch.Tensor = x) -> None:
            half = name.endswith("bf16")
            with torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext():
                value = loss(model, x)
            value.backward()

        for _ in range(WARM_UP):
            step()
            model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=200000)
        step()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        found = {
            "rows": rows,
            "base": base,
            "peak_over_base": torch.cuda.max_memory_allocated() - base,
            "reserved_over_base": torch.cuda.max_memory_reserved() - reserved,
            "events": events_of(trace),
        }
        model.zero_grad()
        if rows in named:
            first = torch.cuda.memory_stats()["allocation.all.allocated"]
            with Operators() as operators:
                step()
            found["operators"] = [(began - first, operator) for began, operator in operators.names]
            model.zero_grad()
        yield found
    del model, step
    torch.cuda.empty_cache()


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        try:
            for found in measure(
                request["model"], request["rows"], request["named"], request["leave_out"]
            ):
                print(json.dumps(found, separators=(",", ":")), flush=True)
            last = {"done": request["model"]}
        except Exception as error:  # goes back in words
            last = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(last), flush=True)


if __name__ == "__main__":
    main()
