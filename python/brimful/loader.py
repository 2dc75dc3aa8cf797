"""How a DataLoader should be set, from what a training loop waits for."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from brimful import _C
from brimful._C import LoaderAdvice

__all__ = ["LoaderAdvice", "LoaderAdvisor"]

Batch = TypeVar("Batch")
_NOTICEABLE = 0.05  # of a step


class LoaderAdvisor(Generic[Batch]):
    """Stands around a loader in a training loop, measures the first ``steps`` batches, and advises.

    ::

        advisor = brimful.LoaderAdvisor(loader, steps=50)
        for batch in advisor:
            with advisor.copying():          # if you want the copy apart
                batch = batch.to(device)
            ...
        print(advisor.advice())

    Two clock readings a batch, and nothing after ``steps``. Work on a GPU counts where the loop waits for it
    (``.item()``, say). Raises ``ValueError`` unless ``steps`` is positive.
    """

    def __init__(self, loader: Iterable[Batch], *, steps: int = 50) -> None:
        if steps < 1:
            raise ValueError(f"steps must be positive (steps: {steps})")
        self.loader = loader
        self._most = steps
        self._steps = 0
        self._epochs = 0
        self._waits: list[float] = []
        self._copies: list[float] = []
        self._work = self._first_wait = 0.0
        self._private: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        if self._steps >= self._most:
            yield from self.loader
            return
        self._epochs += 1
        asked = time.perf_counter()
        iterator = iter(self.loader)
        first = True
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            came = time.perf_counter()
            if first:
                self._first_wait += came - asked
            else:
                self._note(came - asked, iterator)
            yield batch
            asked = time.perf_counter()
            self._work += 0.0 if first else asked - came
            first = False
            if self._steps >= self._most:
                yield from iterator
                return

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Around the copy of a batch to the device."""
        began = time.perf_counter()
        yield
        if self._steps > 0 and len(self._copies) < self._most:  # the first may start CUDA
            self._copies.append(time.perf_counter() - began)

    def advice(self) -> LoaderAdvice:
        """What to change, and why; ``print`` shows it. Of fewer than five measured steps: what to start with."""
        steps = max(self._steps, 1)
        wait, work = sum(self._waits) / steps, self._work / steps
        growth = [last - before for before, last in self._private.values()]
        loader = self.loader
        return _C._advise_loader(
            steps=self._steps,
            wait_ms=1e3 * wait,
            late_steps=sum(waited > _NOTICEABLE * (wait + work) for waited in self._waits),
            work_ms=1e3 * work,
            copy_ms=1e3 * statistics.median(self._copies) if self._copies else None,
            first_wait_ms=1e3 * self._first_wait / max(self._epochs, 1),
            epochs=max(self._epochs, 1),
            num_workers=getattr(loader, "num_workers", 0),
            prefetch_factor=getattr(loader, "prefetch_factor", None),
            pin_memory=bool(getattr(loader, "pin_memory", False)),
            persistent_workers=bool(getattr(loader, "persistent_workers", False)),
            cuda=torch.cuda.is_available(),
            cpus=_C._usable_cpus(),
            processes=_ranks_here(),
            worker_growth_bytes=max(growth, default=None),
        )

    def _note(self, waited: float, iterator: Any) -> None:
        self._waits.append(waited)
        self._steps += 1
        # Workers' memory is looked at a few times only: the kernel walks their pages.
        if self._steps in (self._most // 5 + 1, self._most):
            for worker in getattr(iterator, "_workers", ()):
                bytes_now = _C._private_bytes(worker.pid)
                if bytes_now is not None:
                    before = self._private.get(worker.pid, (bytes_now, 0))[0]
                    self._private[worker.pid] = (before, bytes_now)


def _ranks_here() -> int:
    with contextlib.suppress(ValueError):
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return 1
