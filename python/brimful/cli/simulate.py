"""`brimful simulate -- COMMAND`: a program on simulated CUDA devices, which are libraries beside this package."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import brimful

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run a command there; returns its exit status, 2 where this package has no simulated device."""
    runner = Path(brimful.__file__).with_name("cuda_sim") / "run.py"
    if not runner.with_name("libcudart.so.13").exists():
        print(
            f"brimful simulate: this brimful has no simulated device (torch.version.cuda: {torch.version.cuda}, "
            f"platform: {sys.platform}): it is built where torch is for CUDA 13 and the system is Linux on x86-64",
            file=sys.stderr,
        )
        return 2
    sys.argv = ["brimful simulate", *arguments]
    return int(runpy.run_path(str(runner))["main"]())
