"""What the simulated device offers to tests."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
RUN = Path(__file__).resolve().parents[2] / "csrc" / "cuda_sim" / "run.py"

_process = ctypes.CDLL(None)
sim = _process if hasattr(_process, "sim_cuda_calls") else None


# A program that begins with it allocates by a library of its own, one request of the driver each.
PLUGGABLE = f"""
import ctypes, torch
library = {str(Path(os.environ.get("LD_PRELOAD", "").split(":")[0]).parent / "libsim_pluggable.so")!r}
torch.cuda.memory.change_current_allocator(
    torch.cuda.memory.CUDAPluggableAllocator(library, "pluggable_allocate", "pluggable_free")
)
requests = ctypes.CDLL(library).pluggable_requests
"""


def set_delay(us):
    """Streams start their work `us` microseconds later; None: inside the call."""
    sim.sim_cuda_set_delay(ctypes.c_long(-1 if us is None else us))


def plant_fault(function, error, after=0, times=1):
    """Calls of this function of the runtime fail: after `after` more calls, `times` times."""
    sim.sim_cuda_plant_fault(function.encode(), error, ctypes.c_long(after), ctypes.c_long(times))


def calls(function):
    sim.sim_cuda_calls.restype = ctypes.c_long
    return sim.sim_cuda_calls(function.encode())


def program(source, **environment):
    """Runs Python source as a program on the simulated device: its status and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def outside():
    """The variables of this process without those of the devices that it runs on."""
    left_out = ("LD_PRELOAD", "SIM_CUDA_MEMORY_MB", "SIM_CUDA_DEVICE")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def without_arithmetic(source, device=None, options=(), **environment):
    """Runs Python source on such a device: its status and what it said."""
    libraries = Path(os.environ["LD_PRELOAD"].split(":")[0]).parent
    chosen = {"SIM_CUDA_DEVICE": device} if device else {}
    done = subprocess.run(
        [
            sys.executable,
            RUN,
            "--libraries",
            libraries,
            *options,
            "--",
            sys.executable,
            "-c",
            source,
        ],
        env={**outside(), "SIM_CUDA_ARITHMETIC": "0", **chosen, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr
