"""What a job's steps did, to where it is looked at: Prometheus, OpenTelemetry, TensorBoard, Weights & Biases, a file.

Figures are those that the C++ core keeps anyway; a step between two samples costs one look at the clock.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from brimful._log import text_of
from brimful.metrics._exporters import (
    Exporter,
    JsonLines,
    OpenTelemetry,
    Prometheus,
    TensorBoard,
    WandB,
)
from brimful.metrics._figures import (
    HELP,
    PipelineCounts,
    Sample,
    Seen,
    finite,
    of_reducer,
    of_sizer,
)
from brimful.reducer import DistributedDataParallel

if TYPE_CHECKING:
    from brimful.pipeline import Pipeline
    from brimful.sizer import BatchSizer

__all__ = [
    "HELP",
    "Exporter",
    "JsonLines",
    "Metrics",
    "OpenTelemetry",
    "Prometheus",
    "Sample",
    "TensorBoard",
    "WandB",
]

_WAITING = 64  # samples that exporters may be behind by
_CLOSE_S = 5.0  # that the end of a program waits for exporters


class Metrics:
    """Gives samples of a job's steps to exporters, on each rank by itself; the training loop stays as it is.

    ::

        metrics = brimful.metrics.Metrics(
            sizer=sizer, to=[brimful.metrics.JsonLines("metrics"), brimful.metrics.Prometheus(9400 + local_rank)]
        )

    It looks at what it is given: the ``sizer`` after each of its steps, with ``ddp`` for the times of its buckets (by
    default the sizer's only wrapped module); a ``ddp`` without a sizer before each training forward, so at the step
    before it; a ``pipeline`` after each of its steps. A sample is taken after the first step and then at most every
    ``interval_s`` seconds (0: after each step). Counts are over all steps, also those between samples.

    ``values()`` may give figures of the program's own, such as ``{"tokens_total": ...}``: a name that ends in
    ``_total`` is a counter. ``job`` is a name for labels, by default ``TORCHELASTIC_RUN_ID`` or ``SLURM_JOB_ID``.

    Exporters are called from a thread of this object's. What one raises, or ``values`` does, is logged once and never
    raised into the program; an exporter that cannot be made (a port in use, a package that is missing) raises where it
    is made. ``close()``, which the end of the program calls too, writes a last sample and waits for the exporters, at
    most five seconds.
    """

    def __init__(
        self,
        *,
        sizer: BatchSizer | None = None,
        ddp: DistributedDataParallel | None = None,
        pipeline: Pipeline | None = None,
        to: Sequence[Exporter],
        interval_s: float = 1.0,
        values: Callable[[], Mapping[str, float]] | None = None,
        job: str | None = None,
    ) -> None:
        if sizer is None and ddp is None and pipeline is None:
            raise ValueError("there is nothing to look at; pass sizer=, ddp= or pipeline=")
        if sizer is not None and pipeline is not None:
            raise ValueError(
                "steps are counted of a sizer or a pipeline, not both; make one Metrics for each"
            )
        if not interval_s >= 0:
            raise ValueError(f"interval_s must not be negative (interval_s: {interval_s})")
        for exporter in to:
            if not callable(getattr(exporter, "write", None)):
                raise TypeError(f"an exporter has write(sample) and close() (to: {exporter!r})")
        if ddp is None and sizer is not None:
            ddp = _only_wrapped(sizer)
        self._sizer = _weak(sizer)
        self._ddp = _weak(ddp)
        self._pipeline = _weak(pipeline)
        self._counts = PipelineCounts() if pipeline is not None else None
        self._exporters = list(to)
        self._interval_s = interval_s
        self._values = values
        self._job = _job_name() if job is None else job
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._rank, self._world_size = _place(ddp)
        self._due = 0.0
        self._seen = Seen()
        self._began = time.monotonic()
        self._last: dict[str, float] = {}
        self._outcome: Any = None
        self._failed: set[object] = set()
        self._lost = 0
        self._closed = False
        self._queue: queue.Queue[Sample | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._observe(sizer, pipeline, ddp)
        _running.add(self)

    def _observe(self, *objects: Any) -> None:
        """Be called after each step: by the first that there is, so that a step counts once."""
        self._observed = _weak(next(found for found in objects if found is not None))
        observed = self._observed()
        observed._observers = (*observed._observers, self._after_step)

    def _after_step(self, outcome: Any = None) -> None:
        self._outcome = outcome
        if self._counts is not None:
            self._counts.note(outcome)
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._interval_s
        self._sample()

    def _sample(self, ended: bool = False) -> None:
        with self._never_raising("a sample"):
            if os.getpid() != self._pid:  # a fork of the program, that makes steps
                return
            values = dict(self._last) if ended else {}  # what was looked at may be gone
            if (ddp := self._ddp()) is not None:  # it may have another group than before
                self._rank, self._world_size = _place(ddp)
            for name, value in self._figures():
                if (number := finite(value)) is not None:
                    values[name] = number
            if (mean := self._mean_seconds(values)) is not None:
                values["step_seconds"] = mean
            self._last = values
            self._put(
                Sample(
                    time=time.time(),
                    step=int(values.get("steps_total", 0)),
                    rank=self._rank,
                    world_size=self._world_size,
                    job=self._job,
                    host=self._host,
                    pid=self._pid,
                    values=values,
                    ended=ended,
                )
            )

    def _mean_seconds(self, values: Mapping[str, float]) -> float | None:
        """A plain loop is in no step of brimful's: its steps last from one to the next."""
        now = time.monotonic() - self._began
        return self._seen.mean(
            values.get("steps_total", 0), values.get("stepping_seconds_total", now)
        )

    def _figures(self) -> Iterator[tuple[str, float | None]]:
        sizer, ddp, pipeline = self._sizer(), self._ddp(), self._pipeline()
        if ddp is not None and ddp._reducer is not None:
            yield from of_reducer(ddp._reducer)  # what the others say of steps counts
        if pipeline is not None and self._counts is not None:
            yield from self._counts.figures(self._outcome)
        if sizer is not None:
            yield from of_sizer(sizer, self._outcome, self._rank)
        if self._lost:
            yield "samples_lost_total", self._lost
        if self._values is not None:
            with self._never_raising("values"):
                yield from self._values().items()

    def _put(self, sample: Sample) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="brimful-metrics", daemon=True
            )
            self._thread.start()
        try:
            self._queue.put(sample, timeout=_CLOSE_S if sample.ended else 0)
        except queue.Full:
            self._lost += 1

    def _write_all(self) -> None:
        while (sample := self._queue.get()) is not None:
            for exporter in self._exporters:
                with self._never_raising(exporter):
                    exporter.write(sample)
        for exporter in self._exporters:
            with self._never_raising(exporter):
                exporter.close()

    def _never_raising(self, what: object) -> _Once:
        return _Once(self._failed, what)

    def close(self) -> None:
        """Write a last sample and end the exporters. Again does nothing."""
        if self._closed:
            return
        self._closed = True
        _running.discard(self)
        if (observed := self._observed()) is not None:
            observed._observers = tuple(o for o in observed._observers if o != self._after_step)
        if os.getpid() != self._pid:
            return
        self._sample(ended=True)
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Once:
    """Around what may fail: the first error of each thing is logged, and the program goes on. Ctrl-C passes."""

    def __init__(self, failed: set[object], what: object) -> None:
        self._failed, self._what = failed, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        key, name = id(self._what), type(self._what).__name__
        if isinstance(self._what, str):
            key = name = self._what  # type: ignore[assignment]
        if key not in self._failed:
            self._failed.add(key)
            with suppress(Exception):  # a handler of the program's
                logging.getLogger("brimful").warning(
                    "metrics go on, but a part of them failed; further failures of it are not logged (what: %s): %s",
                    name,
                    text_of(error),
                )
        return True


_running: weakref.WeakSet[Metrics] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for metrics in list(_running):
        metrics.close()


def _weak(found: Any) -> Callable[[], Any]:
    return (lambda: None) if found is None else weakref.ref(found)


def _only_wrapped(sizer: BatchSizer) -> DistributedDataParallel | None:
    models = [sizer._model] if isinstance(sizer._model, torch.nn.Module) else sizer._model
    wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
    return wrapped[0] if len(wrapped) == 1 else None


def _job_name() -> str:
    names = "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _place(ddp: DistributedDataParallel | None) -> tuple[int, int]:
    """This process's rank, in the job."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return (ddp.reducer.rank, ddp.reducer.world_size) if ddp is not None else (0, 1)
