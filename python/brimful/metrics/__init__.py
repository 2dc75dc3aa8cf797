"""What a job's steps did, to where it is looked at: Prometheus, OpenTelemetry, TensorBoard, Weights & Biases, a file.

Figures are those that the C++ core keeps anyway; a step between two samples costs one look at the clock.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from brimful import _C
from brimful._log import text_of
from brimful.metrics import _together
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
    Sample,
    Seen,
    finite,
    of_pipeline,
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

    Several ``Metrics`` of a process may go to one place (a folder, a registry, a meter, a run), or share an exporter,
    which ends with the last of them. ``name`` distinguishes them there, in letters, digits, ``.``, ``_`` and ``-``; of
    those with the same one the second is ``2``, or ``NAME-2``, and so on, until one before it is closed.

    Exporters are called from a thread of this object's. What one raises, or ``values`` does, is logged once and never
    raised into the program; an exporter that cannot be made (a port in use, a package that is missing) raises where it
    is made. ``close()``, which the end of the program calls too, writes a last sample and waits for the exporters, at
    most five seconds. A fork of the process needs ``Metrics`` of its own.
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
        name: str = "",
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
        if not re.fullmatch(r"[\w.-]*", name, re.ASCII):
            raise ValueError(f"a name has letters, digits, ., _ and - (name: {name!r})")
        if ddp is None and sizer is not None:
            ddp = _only_wrapped(sizer)
        self._stepper = _weak(sizer if sizer is not None else pipeline)
        self._ddp = _weak(ddp)
        self._of_steps = of_sizer if sizer is not None else of_pipeline
        self._exporters = list(to)
        self._interval_s = interval_s
        self._values = values
        self._job = _job_name() if job is None else job
        self._name, self._source = name, next(_numbers)
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
        self._queue: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._observe(sizer, pipeline, ddp)
        _together.enter(self)
        _close_at_exit_first()

    def _observe(self, sizer: Any, *others: Any) -> None:
        """Be called after each step: by the first that there is, so that a step counts once."""
        observed = next(found for found in (sizer, *others) if found is not None)
        stepper = self._stepper()
        observer = _Observer(self, None if stepper is None else stepper._core)
        self._observed, self._observer = weakref.ref(observed), weakref.ref(observer)
        observed._observers = (*observed._observers, observer)

    def _after_step(self, outcome: Any = None) -> None:
        self._outcome = outcome
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._interval_s
        self._sample()

    def _sample(self, ended: bool = False) -> None:
        with self._never_raising("a sample"):
            if os.getpid() != self._pid:
                self._warn_of_fork()
                return
            ddp = self._ddp()
            if ddp is not None or _is_initialized():  # it may have another group than before
                self._rank, self._world_size = _place(ddp)
            values = self._all_figures()
            if ended:  # what was looked at may be gone
                values = {**self._last, **values}
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
                    name=self._name,
                    source=self._source,
                )
            )

    def _note_end(self, core: _C.BatchSizer | _C.Pipeline) -> None:
        """What steps goes, and its steps since the last sample count too. In the middle of anything: take no locks."""
        if not self._closed and os.getpid() == self._pid:
            with self._never_raising("a sample"):
                self._last = {**self._last, **self._figures(self._of_core(core))}

    def _all_figures(self) -> dict[str, float]:
        stepper = self._stepper()
        core = None if stepper is None else stepper._core
        return self._figures(self._of_ddp(), self._of_core(core), self._own())

    def _figures(self, *parts: Iterator[tuple[str, float | None]]) -> dict[str, float]:
        """Each part by itself: one that fails leaves the others."""
        values: dict[str, float] = {}
        for part in parts:
            with self._never_raising("figures"):
                for name, value in part:
                    if (number := finite(value)) is not None:
                        values[name] = number
        if (mean := self._mean_seconds(values)) is not None:
            values["step_seconds"] = mean
        return values

    def _mean_seconds(self, values: Mapping[str, float]) -> float | None:
        """A plain loop is in no step of brimful's: its steps last from one to the next."""
        now = time.monotonic() - self._began
        return self._seen.mean(
            values.get("steps_total", 0), values.get("stepping_seconds_total", now)
        )

    def _of_ddp(self) -> Iterator[tuple[str, float | None]]:
        ddp = self._ddp()
        if ddp is not None and ddp._reducer is not None:
            yield from of_reducer(ddp._reducer)  # what the others say of steps counts

    def _of_core(
        self, core: _C.BatchSizer | _C.Pipeline | None
    ) -> Iterator[tuple[str, float | None]]:
        if core is not None:
            yield from self._of_steps(core.report(), self._outcome, self._rank)

    def _own(self) -> Iterator[tuple[str, float | None]]:
        if self._lost:
            yield "samples_lost_total", self._lost
        own: Mapping[str, float] = {}
        with self._never_raising("values"):
            own = {} if self._values is None else dict(self._values())
        for name, value in own.items():
            number = None
            with self._never_raising("values"):  # what is no number leaves the others
                number = finite(value)
            yield str(name), number

    def _put(self, sample: Sample) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._write_all, name="brimful-metrics", daemon=True)
            thread.start()
            self._thread = thread
        if not sample.ended and self._queue.qsize() >= _WAITING:
            self._lost += 1
            return
        self._queue.put(sample)

    def _write_all(self) -> None:
        while (sample := self._queue.get()) is not None:
            for exporter in self._exporters:
                with self._never_raising(exporter, BaseException):  # of a thread of ours
                    exporter.write(sample)
        for exporter in _together.leave(self):
            with self._never_raising(exporter, BaseException):
                exporter.close()

    def _never_raising(self, what: object, kind: type[BaseException] = Exception) -> _Once:
        return _Once(self._failed, what, kind)

    def _warn_of_fork(self) -> None:
        if "fork" not in self._failed:
            self._failed.add("fork")
            _warn(
                "steps of a fork are in no metrics (process: %d, made in: %d); make Metrics in the process that steps",
                os.getpid(),
                self._pid,
            )

    def close(self) -> None:
        """Write a last sample and end the exporters. Again does nothing."""
        if self._closed:
            return
        self._closed = True
        if (observed := self._observed()) is not None:
            mine = self._observer()
            observed._observers = tuple(o for o in observed._observers if o is not mine)
        if os.getpid() != self._pid:
            return
        self._sample(ended=True)
        self._queue.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _warn("exporters were not done when their time was over (seconds: %g)", _CLOSE_S)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Observer:
    """Called after each step. It goes with what it observes, whose counts are final then."""

    def __init__(self, metrics: Metrics, core: _C.BatchSizer | _C.Pipeline | None) -> None:
        self._metrics, self._core = metrics, core

    def __call__(self, outcome: Any = None) -> None:
        self._metrics._after_step(outcome)

    def __del__(self) -> None:
        if self._core is not None:
            self._metrics._note_end(self._core)


class _Once:
    """Around what may fail: the first error of each thing is logged, and the program goes on. Ctrl-C passes."""

    def __init__(self, failed: set[object], what: object, kind: type[BaseException]) -> None:
        self._failed, self._what, self._kind = failed, what, kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, self._kind):
            return False
        key, name = id(self._what), type(self._what).__name__
        if isinstance(self._what, str):
            key = name = self._what  # type: ignore[assignment]
        if key not in self._failed:
            self._failed.add(key)
            _warn(
                "metrics go on, but a part of them failed; further failures of it are not logged (what: %s): %s",
                name,
                text_of(error),
            )
        return True


def _warn(text: str, *values: object) -> None:
    with suppress(Exception):  # a handler of the program's
        logging.getLogger("brimful").warning(text, *values)


_numbers = itertools.count(1)


def _close_all() -> None:
    for metrics in _together.running():
        metrics.close()


def _close_at_exit_first() -> None:
    """What is registered last is called first: exporters' libraries end themselves there too."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _weak(found: Any) -> Callable[[], Any]:
    return (lambda: None) if found is None else weakref.ref(found)


def _only_wrapped(sizer: BatchSizer) -> DistributedDataParallel | None:
    models = [sizer._model] if isinstance(sizer._model, torch.nn.Module) else sizer._model
    wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
    return wrapped[0] if len(wrapped) == 1 else None


def _job_name() -> str:
    names = "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _place(ddp: DistributedDataParallel | None) -> tuple[int, int]:
    """This process's rank, in the job."""
    if _is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if ddp is not None:
        return ddp.reducer.rank, ddp.reducer.world_size
    given = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]  # by a launcher
    return (int(given[0]), int(given[1])) if all(map(str.isdecimal, given)) else (0, 1)
