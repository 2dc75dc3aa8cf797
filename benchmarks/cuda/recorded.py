"""What torch's CUDA allocator is asked for and what it then has, event by event, as torch reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

REQUESTS = ("alloc", "free_requested", "free_completed")
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

Moment = tuple[int, int]  # bytes allocated, and reserved


class Recorded:
    """`run()` on the device: its pool before, its requests, and what was allocated and reserved behind each.

    `allocated` has None where torch's profiler does not report it: of some frees between two operators.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        from brimful import _C

        torch.cuda.synchronize()
        pool = _C._cuda_pool("cuda")
        assert pool is not None
        self.pool = pool
        reserved = torch.cuda.memory_reserved()
        history = torch.cuda.memory._record_memory_history
        history("all", context=None, stacks="python", max_entries=1 << 20, clear_history=True)
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                run()
            events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        finally:
            history(None)
        self.requests: list[tuple[str, int, int, int]] = []
        self.reserved: list[int] = []
        for event in events:
            reserved += SEGMENTS.get(event["action"], 0) * event["size"]
            if event["action"] in REQUESTS:
                self.requests.append(
                    (event["action"], event["addr"], event["size"], event["stream"])
                )
                self.reserved.append(reserved)
        self.allocated = self._of_requests(allocations_of(profiled))

    def _of_requests(self, allocations: list[tuple[int, bool, int]]) -> list[int | None]:
        told = iter(allocations)
        following = next(told, None)
        found: list[int | None] = []
        for action, block, *_ in self.requests:
            is_it = action != "free_completed" and following is not None
            if is_it and following is not None and following[:2] == (block, action == "alloc"):
                found.append(following[2])
                following = next(told, None)
            else:
                found.append(None)
        assert following is None
        return found

    def replay(self) -> list[Moment]:
        """What the model of the allocator has behind each request."""
        after, ran_out, _ = self.pool.replay(self.requests)
        assert ran_out is None
        return after

    def differences(self) -> list[tuple[Any, ...]]:
        """Requests behind which the model has something else."""
        return [
            (index, request, told, (allocated, reserved))
            for index, (request, told, allocated, reserved) in enumerate(
                zip(self.requests, self.replay(), self.allocated, self.reserved, strict=True)
            )
            if told != (told[0] if allocated is None else allocated, reserved)
        ]

    def peak(self) -> Moment:
        """The most that was allocated, and the most that was reserved."""
        return max(bytes or 0 for bytes in self.allocated), max(self.reserved)


def allocations_of(profiled: Any) -> list[tuple[int, bool, int]]:
    """Of CUDA, in order: the block, whether it was taken, and the bytes allocated then."""
    found = []
    nodes = list(profiled.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag == _EventType.Allocation and node.extra_fields.device.type == "cuda":
            event = node.extra_fields
            taken = event.alloc_size > 0
            found.append((node.start_time_ns, event.ptr, taken, event.total_allocated))
    return [event[1:] for event in sorted(found)]
