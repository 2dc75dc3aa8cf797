"""The optimizer's state on the host: bytes on the device with it there, over those without."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import common

IDS = ("ladder.state_room",)
REASON = 'the ladder has no rung "state" yet: the optimizer\'s state stays on the device'


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the reason why there is no figure."""
    yield common.unmeasured(IDS[0], REASON, conditions=common.machine_conditions())
