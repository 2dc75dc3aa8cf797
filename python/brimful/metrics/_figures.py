"""What is measured: each figure's name and meaning, and where it is read. docs/metrics.md has the same table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from brimful import _C

#: By name. What ends in ``_total`` only grows within a process; the others are of the last step, or as they are now.
HELP = {
    "steps_total": "Steps that all ranks have made",
    "failed_steps_total": "Steps that raised",
    "retries_total": "Attempts that were repeated since memory ran out on some rank",
    "ooms_total": "Times memory ran out on this rank",
    "cache_releases_total": "Attempts repeated after the cache of torch's allocator was released",
    "garbage_collections_total": "Attempts repeated after garbage in reference cycles was collected",
    "stepping_seconds_total": "Time in steps",
    "lost_seconds_total": "Time in attempts that were repeated",
    "launches_total": "Collectives that carried buckets",
    "exchanges_total": "Small collectives beside buckets",
    "host_waits_total": "Waits of this process for its buckets",
    "samples_lost_total": "Samples that were dropped since exporters were too slow",
    "step_seconds": "Mean time of the steps since the sample before",
    "work_seconds": "This rank's own work in the last step, without waiting for others",
    "slowest_work_seconds": "The slowest rank's work in the last step",
    "slowest_rank": "The rank whose work took longest in the last step",
    "loss": "Mean loss of the last step over all ranks",
    "pieces": "Pieces of the last step on this rank",
    "piece_rows": "Rows of the largest piece of the last step",
    "recomputed_modules": "Modules that the last step recomputed",
    "offloaded_modules": "Modules whose saved tensors the last step offloaded",
    "peak_bytes": "Peak of the last step",
    "limit_bytes": "The limit that a step keeps to",
    "fill_ratio": "Peak of the last step over the limit",
    "stop": "1 once all ranks stop after this step",
    "backward_seconds": "Backward of the last step",
    "wait_seconds": "Wait for buckets in the last step",
    "sent_bytes": "Bytes of the last step's buckets",
    "straggler_rank": "The rank for which the last step's buckets waited",
    "straggler_seconds": "How long they waited for it",
    "microbatches": "Microbatches of the pipeline's last step",
    "recomputed_stages": "Stages that the pipeline's last step recomputed",
    "offloaded_stages": "Stages whose saved tensors the pipeline's last step offloaded",
    "stage_wait_seconds": "The longest wait of a stage in the pipeline's last step",
    "regroups_total": "New groups with which this rank went on",
}


@dataclass(frozen=True)
class Sample:
    """What a rank has to report at one moment. ``values`` are by figure; what is not known is not there."""

    time: float  # seconds since 1970
    step: int
    rank: int
    world_size: int
    job: str
    host: str
    pid: int
    values: Mapping[str, float]
    ended: bool = False  # the last one
    name: str = ""  # of the ``Metrics``, where several of a process go to one place
    source: int = 0  # a number for each ``Metrics`` of a process


@dataclass
class Seen:
    """What the sample before had, for means since then."""

    steps: float = 0
    seconds: float = 0
    last: dict[str, float] = field(default_factory=dict)

    def mean(self, steps: float, seconds: float) -> float | None:
        new_steps, new_seconds = steps - self.steps, seconds - self.seconds
        self.steps, self.seconds = steps, seconds
        return new_seconds / new_steps if new_steps > 0 else None


def _of_steps(report: _C.Report, outcome: _C.Outcome | None) -> Iterator[tuple[str, float | None]]:
    """Of whatever makes steps, and of the outcome of its last one, where there is one."""
    yield "steps_total", report.steps
    yield "failed_steps_total", report.failed
    yield "retries_total", report.retries
    yield "ooms_total", report.ooms
    yield "cache_releases_total", report.cache_releases
    yield "garbage_collections_total", report.garbage_collections
    yield "stepping_seconds_total", report.total_ms / 1e3
    yield "lost_seconds_total", report.lost_ms / 1e3
    yield "limit_bytes", report.limit_bytes
    yield "fill_ratio", report.last_fill
    if report.history:
        yield "piece_rows", report.history[-1].piece_rows
    if outcome is not None:
        yield "loss", outcome.loss
        yield "pieces", outcome.pieces
        yield "peak_bytes", outcome.peak_bytes if outcome.peaks else None
        yield "stop", outcome.stop


def of_sizer(
    report: _C.Report, outcome: _C.Outcome | None, rank: int
) -> Iterator[tuple[str, float | None]]:
    """Of a ``BatchSizer``."""
    yield from _of_steps(report, outcome)
    if outcome is None:
        return
    work_ms = outcome.work_ms
    known = [(ms, of_rank) for of_rank, ms in enumerate(work_ms) if ms == ms]  # NaN: not known
    if len(known) > 1:
        slowest_ms, slowest = max(known)
        yield "slowest_rank", slowest
        yield "slowest_work_seconds", slowest_ms / 1e3
    own = 0 if len(work_ms) == 1 else rank  # alone, whatever its rank in the job
    if own < len(work_ms):
        yield "work_seconds", work_ms[own] / 1e3
    yield "recomputed_modules", len(outcome.rungs.recomputed)
    yield "offloaded_modules", len(outcome.rungs.offloaded)


def of_pipeline(
    report: _C.Report, outcome: _C.Outcome | None, _rank: int
) -> Iterator[tuple[str, float | None]]:
    """Of a ``Pipeline``."""
    yield from _of_steps(report, outcome)
    if outcome is None:
        return
    yield "microbatches", outcome.pieces
    yield "recomputed_stages", len(outcome.rungs.recomputed)
    yield "offloaded_stages", len(outcome.rungs.offloaded)
    yield "stage_wait_seconds", max((s.wait_ms / 1e3 for s in outcome.stages), default=None)


def of_reducer(reducer: _C.Reducer) -> Iterator[tuple[str, float | None]]:
    """Of a ``DistributedDataParallel``."""
    counters = reducer.counters
    yield "steps_total", counters.steps
    yield "launches_total", counters.launches
    yield "exchanges_total", counters.exchanges
    yield "host_waits_total", counters.host_waits
    yield "regroups_total", counters.regroups
    yield "stop", reducer.stop
    times = reducer.times()
    if times:
        last = times[-1]
        yield "backward_seconds", last.backward_ms / 1e3
        yield "wait_seconds", last.wait_ms / 1e3
        yield "sent_bytes", last.bytes
        if last.straggler >= 0:
            yield "straggler_rank", last.straggler
            yield "straggler_seconds", last.straggler_ms / 1e3


def finite(value: float | None) -> float | None:
    """The number, or None for what no exporter can write."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
