"""Memory that grows from step to step: the line that makes it, the variable that holds it, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from brimful import _C, memory
from brimful._log import unheard

__all__ = ["LeakFinder", "who_holds"]

Item = TypeVar("Item")


class LeakFinder:
    """Watches the memory of a training or evaluation loop for lines whose tensors pile up.

    ::

        with brimful.LeakFinder() as finder:
            for batch in finder.watch(loader):   # or finder.step() at the end of each step
                ...
        print(*finder.leaks, sep="\\n")

    A step ends at ``step()``; without any, after each ``optimizer.step()``. A line leaks when each of the last
    ``steps`` steps, one after the other or at even intervals, has left tensors of it alive; the first ``warm_up`` steps
    do not count, nor does what is in a container that stops growing by itself (``deque(maxlen=...)``, a small
    ``lru_cache``), nor a window of the last tensors. What operators copy whole into something larger, five times, leaks
    too (``leak.copied``). Then, once for each, the program's variables, containers and
    graphs are searched for what holds them (some tenths of a second), and a warning goes to the logger ``brimful``.
    What may be a cache that fills has ``leak.filling``: it goes from ``leaks`` when it is full, and is reported again
    as a leak after five times as many steps. Inside, memory is tracked (``brimful.memory.start_tracking``).

    Raises ``ValueError`` unless ``steps >= 2`` and ``warm_up >= 0``. Use it from one thread.
    """

    def __init__(self, *, steps: int = 5, warm_up: int = 2) -> None:
        self._core = _C._LeakFinder(steps=steps, warm_up=warm_up)
        self._by_hand = False
        self._started = False
        self._hook: Any = None

    def __enter__(self) -> LeakFinder:
        self._started = not memory.tracking()
        if self._started:
            memory.start_tracking()
        self._hook = register_optimizer_step_post_hook(self._after_optimizer)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self._core.rest()
        if self._started:
            memory.stop_tracking()

    def _after_optimizer(self, *_: Any) -> None:
        if not self._by_hand and memory.tracking():  # which the program may have ended
            with unheard("the leak finder"):
                self._core.check()

    def step(self) -> list[_C.Leak]:
        """End a step; return the leaks that were found now. Raises ``RuntimeError`` where memory is not tracked."""
        self._by_hand = True
        memory.mark_step()
        return self._core.check()

    def watch(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; each of them, with what the loop does with it, is a step."""
        for batch in batches:
            yield batch
            del batch
            if memory.tracking():
                self.step()

    @property
    def leaks(self) -> list[_C.Leak]:
        """All that were found so far."""
        return self._core.leaks


def who_holds(tensor: torch.Tensor) -> _C.Holder:
    """Name a variable, and the way from it, that keeps the tensor's storage alive.

    Takes some tenths of a second. ``kind`` is "unknown" where no Python object holds it.
    """
    if not issubclass(type(tensor), torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor (type: {_C._type_name(tensor)})")
    return _C._who_holds(tensor)
