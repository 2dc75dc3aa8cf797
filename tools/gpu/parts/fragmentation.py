"""Free bytes that lie in pieces between blocks that live: the report of the refused request names fragmentation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tools.gpu.check import Check, check
from tools.gpu.device import MIB, room, settle

BLOCK = 4 * MIB  # five of them lie in a segment of 20 MiB
SEGMENTS = 16
REQUEST = 64 * MIB


def run(small: bool) -> Iterator[Check]:
    """Yields whether the request was refused, and whether the first finding is the cause."""
    import brimful

    settle()
    with room(SEGMENTS * 20 * MIB), brimful.memory.track():
        blocks = [torch.empty(BLOCK, dtype=torch.uint8, device="cuda") for _ in range(5 * SEGMENTS)]
        kept = blocks[::5]
        del blocks
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        try:
            torch.empty(REQUEST, dtype=torch.uint8, device="cuda")
            refused = False
        except torch.OutOfMemoryError:
            refused = True
        report = brimful.memory.last_oom()
    words = f"{free // MIB} MiB free in pieces of 16, {REQUEST // MIB} asked for, {len(kept)} blocks live"
    yield check("refused", refused and free >= 2 * REQUEST, words)
    causes = [finding.cause for finding in report.findings] if report else []
    yield check("the first finding", causes[:1] == ["fragmentation"], f"findings: {causes}")
