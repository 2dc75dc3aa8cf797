"""The parts, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def _allocator(settings: str) -> dict[str, str]:
    """Both names: which one torch reads depends on its version."""
    return {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}


def _tests(folder: str, limit_s: float) -> Part:
    return Part(
        f"tests_{folder}",
        "tests",
        f"Python tests marked gpu: {folder}",
        limit_s,
        {TESTS: folder},
    )


@dataclass(frozen=True)
class Part:
    """`limit_s`: when the part's process is ended. `module`: of tools.gpu.parts."""

    name: str
    module: str
    what: str
    limit_s: float = 120
    environment: Mapping[str, str] = field(default_factory=dict)


TESTS = "GPU_CHECK_TESTS"  # the variable that names a folder of tests/python
# Of tests/python, those that have tests marked gpu: a part each, so that --resume runs what is left of them. Not
# project, whose tests marked gpu are of this command, and of pages about the simulated device.
FOLDERS = {
    "faults": 240,
    "fleet": 120,
    "launch": 120,
    "memory": 240,
    "pipeline": 240,
    "probes": 120,
    "reducer": 120,
    "search": 120,
    "sizer": 480,
}
PARTS = [
    Part("versions", "versions", "versions, the device, brimful doctor"),
    Part("recorded", "recorded", "allocator statistics against those of the simulated device"),
    Part("sticky", "sticky", "a step on a device that is lost"),
    Part("oom", "oom", "memory runs out in forward, backward, recomputation, under AMP"),
    Part("oom_expandable", "oom", "the same", 120, _allocator("expandable_segments:True")),
    Part("oom_async", "oom", "the same", 120, _allocator("backend:cudaMallocAsync")),
    Part("steady", "steady", "200 steps with and without a limit"),
    Part("scaler", "scaler", "GradScaler of C++ against torch's"),
    Part("nccl", "nccl", "NCCL with one rank, on the whole path"),
    Part("gloo", "gloo", "two ranks over gloo, with CUDA tensors of one device"),
    Part("forecast", "forecast", "forecasts against measured peaks, 12 models", 300),
    Part("ddp", "ddp", "launches, waits, idle gap and step time beside torch's DDP", 300),
    Part("kernels", "kernels", "kernels of brimful's own against their fallbacks", 30),
    Part("sanitizer", "sanitizer", "compute-sanitizer on a small step", 300),
    Part("tests_cpp", "tests_cpp", "C++ tests marked gpu", 240),
    *(_tests(folder, limit_s) for folder, limit_s in FOLDERS.items()),
]
BY_NAME = {part.name: part for part in PARTS}
