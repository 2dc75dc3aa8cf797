"""Runs parts side by side, then those that have the device to themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tools.gpu import runner
from tools.gpu.catalogue import Part
from tools.gpu.check import Check

SHORTEST_S = 20  # for which a part is begun
MOST_BYTES = 6 << 30  # that a part takes of the device, its CUDA context among them


@dataclass(frozen=True)
class Done:
    """A part that ran: None for `checks` where the time was over before it began, or before it was done."""

    part: Part
    checks: list[Check] | None
    seconds: float = 0.0


@dataclass(frozen=True)
class Ways:
    """How parts are run: `count` side by side, at which scale, where what they print is kept."""

    count: int = 1
    small: bool = False
    logs: Path | None = None


class Clock:
    """The time that is left of `minutes`, all there is without."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def left_s(self) -> float | None:
        """Seconds, or None where there is no end."""
        return None if self._end is None else self._end - time.monotonic()


def beside(free_bytes: int | None) -> int:
    """How many parts run side by side: as the processors and the device's memory allow."""
    processors = len(os.sched_getaffinity(0))
    return max(1, min(processors - 1, (free_bytes or 0) // MOST_BYTES))


def run(parts: Sequence[Part], ways: Ways, clock: Clock) -> Iterator[Done]:
    """Yields each part when it is done: some side by side, then one after the other."""
    yield from _together([part for part in parts if not part.alone], ways, clock)
    for part in parts:
        if part.alone:
            yield _run(part, ways, clock)


def _together(parts: Sequence[Part], ways: Ways, clock: Clock) -> Iterator[Done]:
    with ThreadPoolExecutor(ways.count) as pool:
        running: set[Future[Done]] = {pool.submit(_run, part, ways, clock) for part in parts}
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BaseException:  # Ctrl-C among them: its parts end too
            pool.shutdown(wait=False, cancel_futures=True)
            runner.end_all()
            raise


def _run(part: Part, ways: Ways, clock: Clock) -> Done:
    left_s = clock.left_s()
    if left_s is not None and left_s < SHORTEST_S:
        return Done(part, None)
    checks, seconds = runner.run_part(part, ways.small, left_s, ways.logs)
    is_cut = left_s is not None and left_s <= seconds < part.limit_s
    return Done(part, None if is_cut else checks, seconds)
