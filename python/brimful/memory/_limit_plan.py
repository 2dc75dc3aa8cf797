"""What a step would have to do to stay within a limit, found without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from brimful import _C
from brimful.sizer._ladder import LadderModules

_RECORDED_ROWS = 2  # the second finds gradients


def limit_plan(
    model: nn.Module,
    device: torch.device,
    run: Callable[[Any, Any, Any], None],
    found: _C.StepSummary,
    piece_of: Callable[[int, int], Any],
    batch: Any,
    peak_of: Callable[[int], int | None],
    limit_bytes: int,
    uncounted: int,
) -> str:
    """``run(batch, begin, end)`` runs a step whose forward is between calls of ``begin`` and ``end``."""
    text = f"within {_C._format_bytes(limit_bytes)}: "
    if found.optimizer_peak_bytes > limit_bytes:
        return f"{text}no plan, the optimizer's step alone takes {_C._format_bytes(found.optimizer_peak_bytes)}"
    if found.peak_bytes <= limit_bytes:
        return f"{text}the whole batch, peak {_C._format_bytes(found.peak_bytes)}"
    batch_bytes = sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor))
    for pieces in range(2, found.rows + 1):
        rows = -(-found.rows // pieces)
        peak = peak_of(rows)
        if peak is None:
            break
        peak += batch_bytes * (found.rows - rows) // found.rows
        if peak <= limit_bytes:
            return f"{text}{pieces} pieces of at most {rows} rows, peak {_C._format_bytes(peak)}"
    modules = LadderModules([model], device)
    step, used_bytes = _record(modules, device, run, found.rows, piece_of, batch)
    used_bytes -= uncounted
    recompute, offload, whole = modules.allowed()
    rungs = step.cheapest(recompute, offload, limit_bytes - used_bytes)
    if rungs is None:
        least, _ = step.cost_of(_C._Rungs(everything=True), whole)
        return f"{text}no plan, a row with all that it saves offloaded takes {_C._format_bytes(used_bytes + least)}"
    peak, more_ms = step.cost_of(rungs, whole)
    forward_ms = sum(ms for _, parent, ms in step.calls if parent < 0)
    names = modules.names()
    named = _C.StepRungs(
        recomputed=[names[place] for place in rungs.recomputed],
        offloaded=[names[place] for place in rungs.offloaded],
    )
    times = f", {1 + more_ms / forward_ms:.2f}x forward time" if forward_ms > 0 else ""
    rows_text = "the row" if found.rows == 1 else f"{found.rows} pieces of 1 row"
    return f"{text}{rows_text}, {named}{times}, peak {_C._format_bytes(used_bytes + peak)}"


def _record(
    modules: LadderModules,
    device: torch.device,
    run: Callable[[Any, Any, Any], None],
    rows: int,
    piece_of: Callable[[int, int], Any],
    batch: Any,
) -> tuple[_C._StepEvents, int]:
    used_bytes = _C._memory_used_bytes(device)
    recorder = _C._StepEventRecorder(device)
    aside = _C._Aside(device, recorder)
    tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
    aside.keep([*tensors, *modules.standing()])
    modules.begin(_C._Rungs(everything=True), aside, recorder)

    def begin() -> None:
        modules.begin_forward()
        recorder.begin_forward()

    def end() -> None:
        modules.end_forward()
        recorder.begin_backward()

    try:
        for row in range(min(rows, _RECORDED_ROWS)):
            run(piece_of(row, row + 1), begin, end)
    except BaseException:
        recorder.stop()  # frames of the error may keep it
        raise
    finally:
        modules.end()
    return recorder.finish(), used_bytes
