"""What a trial of a search sees of its memory, and of the steps of the sizers in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

import torch

from brimful import _C, memory

if TYPE_CHECKING:
    from brimful.sizer import BatchSizer


class WouldRunOut(torch.OutOfMemoryError):
    """Raised before anything was run."""

    def __init__(self, peak_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"memory would run out (peak_bytes: {peak_bytes:,}, limit_bytes: {limit_bytes:,}); use a smaller "
            "batch or model, or raise the limit"
        )
        self.peak_bytes = peak_bytes


class Trial:
    """Within it, in this thread; ``whole`` ends it where a batch cannot be run in one piece."""

    def __init__(self, device: torch.device, whole: bool) -> None:
        self._device, self._whole = device, whole
        self._planned: weakref.WeakSet[BatchSizer] = weakref.WeakSet()
        self._rows = self._effective_batch = self._pieces = self._needed = 0
        self._oom = False
        self.has_sizer = False  # to split batches

    def __enter__(self) -> Trial:
        memory.reset_peak(self._device)
        self._token: Token[Trial | None] = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def before_step(
        self, sizer: BatchSizer, plan: Callable[[], _C.Plan | None], accumulate: bool
    ) -> None:
        """Raise WouldRunOut if the first step of a sizer cannot be run under its device's limit, or on it."""
        self.has_sizer = True
        self._rows = self._rows if accumulate else 0
        if sizer in self._planned:
            return
        self._planned.add(sizer)
        limit_bytes = memory.stats(sizer._device).limit_bytes
        if limit_bytes is None and (sizer._device.type == "cpu" or not self._whole):
            return
        planned = without_limit(plan, sizer._device) if self._whole else plan()
        if limit_bytes is None and planned is not None:
            limit_bytes = planned.limit_bytes  # what the device has
        if planned is None or limit_bytes is None:
            return
        needed = bytes_of(planned)
        if self._whole and (planned.pieces > 1 or needed > limit_bytes):
            bounded = plan()  # on CUDA a limit leaves less in the cache
            if bounded is not None and bounded.pieces == 1:
                return
            needed = max(needed, planned.whole_bytes or 0, limit_bytes + planned.pieces - 1)
        if needed > limit_bytes:
            raise WouldRunOut(needed, limit_bytes)

    def after_step(self, outcome: _C.Outcome) -> None:
        self._rows += sum(outcome.split)
        self._effective_batch = max(self._effective_batch, self._rows)
        self._pieces = max(self._pieces, outcome.pieces)
        if self._whole and any(attempt.ran_out for attempt in outcome.attempts):
            raise torch.OutOfMemoryError(
                f"the batch ran only in pieces, but was to run whole (pieces: {outcome.pieces})"
            )

    def ran_out(self, error: BaseException) -> None:
        self._oom = True
        self._needed = getattr(error, "peak_bytes", 0)

    def facts(self) -> dict[str, int]:
        stats = memory.stats(self._device)
        return {
            "oom": int(self._oom),
            "effective_batch": self._effective_batch,
            "pieces": self._pieces,
            "peak_bytes": max(self._needed, stats.peak_bytes),
        }


_current: ContextVar[Trial | None] = ContextVar("brimful_trial", default=None)
current: Callable[[], Trial | None] = _current.get


def without_limit(plan: Callable[[], _C.Plan | None], device: torch.device) -> _C.Plan | None:
    """What a step takes of the device's memory where no limit makes it smaller."""
    with unlimited(device):
        planned = plan()
        if planned is not None and device.type == "cuda":
            memory.release_cached(device)  # what the few rows left
            planned = plan()
        return planned


@contextmanager
def unlimited(device: torch.device) -> Iterator[None]:
    """Without the limit, which holds again afterwards."""
    limit_bytes = memory.stats(device).limit_bytes
    if limit_bytes is not None:
        memory.set_limit(device, None)
    try:
        yield
    finally:
        if limit_bytes is not None:
            memory.set_limit(device, limit_bytes)


def bytes_of(planned: _C.Plan) -> int:
    """What a limit counts: on CUDA what the allocator reserves."""
    return planned.peak_bytes if planned.reserved_bytes is None else planned.reserved_bytes
