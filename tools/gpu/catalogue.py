"""The parts: what runs beside others, and what has the device to itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "python"
TEST_FILE = "GPU_CHECK_TESTS"  # the variable that names a file below tests/python
# At the simulated device's scale, where `make test-cuda-sim` runs all of them: files, and tests of them ("": all).
SMALL_TESTS = {
    "launch/test_checkpoint.py": "test_tensors_of_any_gpu_go_to_the_ranks_own",
    "search/test_search.py": "test_the_trial_keeps_to_its_fraction_of_a_gpu",
    "sizer/test_cache_release.py": "",
}


@dataclass(frozen=True)
class Part:
    """`limit_s`: when the part's process is ended. `module`: of tools.gpu.parts.

    `alone`: it times something or fills the device, so nothing runs beside it.
    """

    name: str
    module: str
    what: str
    limit_s: float = 120
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


def parts(small: bool = False) -> list[Part]:
    """All parts; at the small scale with a few test files."""
    files = sorted(SMALL_TESTS) if small else test_files()
    return [*PARTS, *map(_test_file, files)]


def test_files() -> list[str]:
    """Files below tests/python that have tests marked gpu.

    Not those of project, whose tests marked gpu are of this command, and of pages about the simulated device.
    """
    return sorted(
        str(file.relative_to(TESTS))
        for file in TESTS.glob("*/test_*.py")
        if file.parent.name != "project" and _MARKED.search(file.read_text())
    )


def _test_file(file: str) -> Part:
    text = (TESTS / file).read_text()
    return Part(
        f"tests/{file.removesuffix('.py')}",
        "tests",
        "tests marked gpu",
        240,
        {TEST_FILE: file},
        alone=_ALONE.search(text) is not None,
    )


def allocator(settings: str) -> dict[str, str]:
    """Both names: which one torch reads depends on its version."""
    return {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}


_MARKED = re.compile(r"\bmark\.(real_)?gpu\b")
_ALONE = re.compile(r"\bmark\.alone\b")
PARTS = [
    Part("versions", "versions", "versions, the device, brimful doctor"),
    Part("recorded", "recorded", "allocator statistics against those of the simulated device"),
    Part("sticky", "sticky", "a step on a device that is lost"),
    Part("oom", "oom", "memory runs out in forward, backward, recomputation, under AMP"),
    Part("oom_expandable", "oom", "the same", 120, allocator("expandable_segments:True")),
    Part("oom_async", "oom", "the same", 120, allocator("backend:cudaMallocAsync")),
    Part("scaler", "scaler", "GradScaler of C++ against torch's"),
    Part("nccl", "nccl", "NCCL with one rank, on the whole path"),
    Part("gloo", "gloo", "two ranks over gloo, with CUDA tensors of one device"),
    Part("forecast", "forecast", "forecasts against measured peaks, 12 models", 180),
    Part("gradient", "gradient", "the gradient of a whole batch against that of its pieces"),
    Part("rungs", "rungs", "steps on the ladder's rungs against those with room, bit by bit"),
    Part("summary", "summary", "brimful.summary against the peak of a step"),
    Part("fragmentation", "fragmentation", "a planted fragmentation, and its finding"),
    Part("two_devices", "two_devices", "two ranks and two stages on two devices"),
    Part("kernels", "kernels", "kernels of brimful's own against their fallbacks", 30),
    Part("sanitizer", "sanitizer", "compute-sanitizer on a small step", 180),
    Part("tests_cpp", "tests_cpp", "C++ tests marked gpu", 240),
    Part("steady", "steady", "200 steps with and without a limit", alone=True),
    Part("by_hand", "by_hand", "a sizer's step beside the same loop by hand", alone=True),
    Part("ddp", "ddp", "calls, collectives and step time beside torch's DDP", 240, alone=True),
]
BY_NAME = {part.name: part for part in PARTS}
