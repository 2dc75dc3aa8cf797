"""Plans of a step: which modules are recomputed, and what of which is offloaded; and a step that runs by one."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.ladder import cases
from benchmarks.sizer import models

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
ROW_BY_ROW = [1] * cases.ROWS


def half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        out: torch.Tensor = model(x).float().square().mean()
    return out


def recorded(model: nn.Module, batch: torch.Tensor, loss: Loss = models.loss) -> tuple[Any, Any]:
    """A step of row after row with all that it saves put aside: its events, and the modules that it met."""
    from brimful import _C
    from brimful.sizer._ladder import LadderModules

    device = torch.device("cpu")
    modules = LadderModules([model], device)
    clear(model)
    recorder = _C._StepEventRecorder(device)
    aside = _C._Aside(device, recorder)
    aside.keep([*modules.standing(), batch])
    modules.begin(_C._Rungs(everything=True), aside, recorder)
    try:
        for row in batch.split(1):
            modules.begin_forward()
            recorder.begin_forward()
            out = loss(model, row) / len(batch)
            modules.end_forward()
            recorder.begin_backward()
            out.backward()
            del out
    finally:
        modules.end()
    events = recorder.finish()
    clear(model)
    return events, modules


def sample(modules: Any, count: int, seed: int = 0) -> dict[str, Any]:
    """`everything`, all that may be recomputed, all offloaded, one of each in turn, then `count` random ones."""
    from brimful import _C

    recompute, offload, _ = modules.allowed()
    leaves = _innermost(modules)
    outer = modules.coarse()
    again = [place for place in outer if recompute[place]]
    found = {
        "everything": _C._Rungs(everything=True),
        "parts recomputed": _C._Rungs(again),
        "leaves recomputed": _C._Rungs([p for p in leaves if recompute[p]]),
        "leaves offloaded": _C._Rungs([], [p for p in leaves if offload[p]]),
        "in turn": _C._Rungs(
            again[::2], [p for p in outer[1::2] if offload[p] and p not in again[::2]]
        ),
    }
    drawn = random.Random(seed)
    for number in range(count):
        found[f"random {number}"] = _random(modules, drawn)
    return {name: plan for name, plan in found.items() if not is_empty(plan)}


def is_empty(plan: Any) -> bool:
    return not (plan.everything or plan.recomputed or plan.offloaded)


def _innermost(modules: Any) -> list[int]:
    return [p for p in range(len(modules.names())) if not list(modules.module(p).children())]


def is_around(outer: str, inner: str) -> bool:
    """Whether one module is the other, or lies around it, by their names."""
    return outer in ("", inner) or inner.startswith(outer + ".")


def _random(modules: Any, drawn: random.Random) -> Any:
    from brimful import _C

    recompute, offload, _ = modules.allowed()
    names = modules.names()
    chosen: list[int] = []
    for place in drawn.sample(range(len(names)), len(names)):
        clashes = any(
            is_around(names[place], names[o]) or is_around(names[o], names[place]) for o in chosen
        )
        if not clashes and (recompute[place] or offload[place]) and drawn.random() < 0.5:
            chosen.append(place)
    again = [p for p in chosen if recompute[p] and (not offload[p] or drawn.random() < 0.5)]
    return _C._Rungs(sorted(again), sorted(set(chosen) - set(again)))


def every(modules: Any) -> list[Any]:
    """All plans there are, and `everything`."""
    from brimful import _C

    recompute, offload, _ = modules.allowed()
    places = {modules.module(place): place for place in range(len(modules.names()))}

    def ways_of(module: nn.Module) -> list[tuple[list[int], list[int]]]:
        ways: list[tuple[list[int], list[int]]] = [([], [])]
        for child in module.children():
            ways = [(a + c, b + d) for a, b in ways for c, d in ways_of(child)]
        place = places[module]
        ways += [([place], [])] if recompute[place] else []
        ways += [([], [place])] if offload[place] else []
        return ways

    found = [_C._Rungs(sorted(again), sorted(aside)) for again, aside in ways_of(modules.module(0))]
    return [*found, _C._Rungs(everything=True)]


def named(modules: Any, plan: Any) -> Any:
    """The plan as `BatchSizer.step` takes it."""
    from brimful import _C

    names = modules.names()
    return _C.StepRungs(
        recomputed=[names[p] for p in plan.recomputed],
        offloaded=[names[p] for p in plan.offloaded],
        everything=plan.everything,
    )


def describe(rungs: Any) -> str:
    """Of a StepRungs."""
    if rungs.everything:
        return "everything"
    ways = {"recomputed": rungs.recomputed, "offloaded": rungs.offloaded}
    parts = [
        f"{way} {', '.join(name or 'the model' for name in names)}"
        for way, names in ways.items()
        if names
    ]
    return "; ".join(parts) or "no rung"


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def used_bytes() -> int:
    import brimful

    return int(brimful.memory.stats("cpu").used_bytes)


@contextmanager
def room(bytes: int) -> Iterator[None]:
    """Leaves so many bytes beyond what is in use."""
    import brimful

    gc.collect()
    brimful.memory.set_limit("cpu", used_bytes() + bytes)
    try:
        yield
    finally:
        brimful.memory.set_limit("cpu", None)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the sizer logs of each step that is repeated."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
