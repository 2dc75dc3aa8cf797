"""What a step calls of the CUDA runtime, beside torch's DDP, counted on a simulated device without arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import common
from benchmarks.cuda.call_counts import LAUNCHES, WAITS
from benchmarks.cuda.device import ROOT, Device, count, simulation

IDS = ("cuda.waits", "cuda.calls", "cuda.collectives")
CASES = ("ResNet-50 fp32", "GPT-2 fp32", "200 Linear(64, 64)")
TORCHS = ("torch", "torch, bucket views", "torch, batched copies")
EVENTS = ("cudaEventRecord", "cudaEventRecordWithFlags", "cudaStreamWaitEvent")
H200 = Device("simulated H200 without arithmetic", True, {})

Counts = dict[str, float]


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the three figures, of the worst case each."""
    if simulation() is None:
        yield from (common.unmeasured(name, common.NEEDS_SIMULATION) for name in IDS)
        return
    cases = CASES[-1:] if quick else CASES
    ours = {case: counts_of(case, "brimful") for case in cases}
    bare = {case: counts_of(case, "bare") for case in cases}
    torchs = {case: [counts_of(case, wrapper) for wrapper in TORCHS] for case in cases}
    waits = {
        f"{case}, {ranks} ranks{', sizer' if sizer else ''}": _sum(
            counts_of(case, "brimful", ranks, sizer), WAITS
        )
        for case in cases
        for ranks in (1, 2)
        for sizer in (False, True)
    }
    yield count(IDS[0], max(waits.values()), H200, len(waits), found=waits)
    kinds = (*LAUNCHES, *EVENTS)
    ratios, collectives = {}, {}
    for case in cases:
        extra = _sum(ours[case], kinds) - _sum(bare[case], kinds)
        best = min(_sum(each, kinds) for each in torchs[case]) - _sum(bare[case], kinds)
        ratios[case] = extra / best
        collectives[case] = ours[case]["collectives"] / min(
            each["collectives"] for each in torchs[case]
        )
    found = {case: {"brimful": ours[case], "bare": bare[case]} for case in cases}
    yield count(IDS[1], max(ratios.values()), H200, len(cases), ratios=ratios, calls=found)
    yield count(IDS[2], max(collectives.values()), H200, len(cases), found=collectives)


def counts_of(
    case: str, wrapper: str, ranks: int = 1, sizer: bool = False, weights: bool = False
) -> Counts:
    """Calls a step of the first rank, by function. `weights`: the sizer's lie on the device."""
    simulated = ["csrc/cuda_sim/run.py", "--device", "h200", "--libraries", str(simulation()), "--"]
    program = ["-m", "benchmarks.cuda.call_counts", case, wrapper, "--ranks", str(ranks)]
    command = [
        sys.executable,
        *simulated,
        sys.executable,
        *program,
        *(["--sizer"] if sizer or weights else []),
        *(["--weights"] if weights else []),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: Counts = json.loads(done.stdout.splitlines()[-1])
    return found


def _sum(counts: Counts, names: tuple[str, ...]) -> float:
    return sum(counts.get(name, 0) for name in names)
