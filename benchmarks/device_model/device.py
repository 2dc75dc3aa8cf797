"""Programs of these benchmarks on the device without arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "h200"


class Unavailable(Exception):
    """Why a program cannot be run here."""


def python() -> str:
    """The interpreter whose torch is asked: that of BRIMFUL_DEVICE_PYTHON, else this one."""
    return os.environ.get("BRIMFUL_DEVICE_PYTHON", sys.executable)


def libraries() -> Path:
    """Where the simulated runtime was built: BRIMFUL_DEVICE_LIBRARIES, else that of the only build."""
    named = os.environ.get("BRIMFUL_DEVICE_LIBRARIES")
    found = [Path(named)] if named else list(ROOT.glob("build/*/python/brimful/cuda_sim"))
    built = [folder for folder in found if (folder / "libcudnn.so.9").exists()]
    if len(built) != 1:
        raise Unavailable(
            f"needs one build of the simulated CUDA runtime (found: {len(built)}): name it by BRIMFUL_DEVICE_LIBRARIES"
        )
    return built[0]


def command(module: str, *arguments: str) -> list[str]:
    """Returns what runs a module of this project there, in the folder ROOT."""
    run = [python(), str(ROOT / "csrc" / "cuda_sim" / "run.py"), "--libraries", str(libraries())]
    return [*run, "--", python(), "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Returns the variables with which it runs: its memory is the named device's."""
    kept = {name: value for name, value in os.environ.items() if name != "SIM_CUDA_MEMORY_MB"}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "SIM_CUDA_ARITHMETIC": "0",
        "SIM_CUDA_DEVICE": NAME,
    }


def ask(module: str, *arguments: object, timeout_s: float) -> str:
    """Runs a module there, and returns the last line that it printed. Raises Unavailable if it fails."""
    done = subprocess.run(
        command(module, *map(str, arguments)),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise Unavailable(f"{module} ended (status: {done.returncode}): {said[-1]}")
    return lines[-1]
