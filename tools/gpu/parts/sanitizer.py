"""compute-sanitizer on a small step: memory errors of the kernels that are called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from tools.gpu.catalogue import ROOT
from tools.gpu.check import Check, check, skipped
from tools.gpu.device import NEEDS_HARDWARE, SIMULATED

STEP = """
import torch, brimful
from torch import nn
model = brimful.BatchSizer(net := nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda())
outcome = model.step(torch.randn(64, 32, device="cuda"), lambda m, x: m(x).square().mean(), split=[40, 24])
torch.cuda.synchronize()
print("pieces", outcome.pieces)
"""


def run(small: bool) -> Iterator[Check]:
    """Looks for the tool on PATH and in CUDA's usual folder."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    tool = shutil.which("compute-sanitizer", path=places)
    if SIMULATED or tool is None:
        yield skipped("compute-sanitizer", NEEDS_HARDWARE if SIMULATED else "it is not found")
        return
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", STEP],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    last = done.stdout.strip().splitlines()[-1:] or [""]
    yield check(
        "memcheck", done.returncode == 0 and "pieces 2" in done.stdout, last[0], done.returncode
    )
