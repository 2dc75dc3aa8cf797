"""Which tests run on a device, real or simulated, and which a real one is known to fail."""

import ctypes
from pathlib import Path

import pytest
import torch

SIMULATED = hasattr(ctypes.CDLL(None), "sim_cuda_calls")
# Tests marked gpu that a real device is known to fail, and why. They are strict: one that passes is noticed.
FAILS_ON_A_GPU = Path(__file__).parent / "fails_on_a_gpu.txt"


def known_failures():
    """Why, by the test's name, of this torch."""
    lines = FAILS_ON_A_GPU.read_text().splitlines()
    known = [line.split("  ", 2) for line in lines if line and not line.startswith("#")]
    return {name: why for of, name, why in known if of == "any" or torch.__version__.startswith(of)}


def mark(items):
    """`gpu` tests run on a real device, else on the simulated one, which has to be loaded first."""
    here = torch.cuda.is_available()
    gpu = pytest.mark.skip(reason="runs on the simulated CUDA device: make test-cuda-sim")
    real_gpu = pytest.mark.skip(reason="needs a real CUDA device")
    fails = known_failures() if here and not SIMULATED else {}
    for item in items:
        if item.get_closest_marker("gpu") and not here:
            item.add_marker(gpu)
        if item.get_closest_marker("real_gpu") and (SIMULATED or not here):
            item.add_marker(real_gpu)
        if why := fails.get(f"{item.path.parent.name}/{item.path.name}::{item.name}"):
            item.add_marker(pytest.mark.xfail(reason=why, strict=True))
