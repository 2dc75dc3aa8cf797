"""A libnvidia-ml.so.1 whose driver is made up, for the tests; built once a session."""

import os
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "csrc" / "cuda_sim" / "nvml"


def build(folder):
    library = Path(folder) / "libnvidia-ml.so.1"
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-o", str(library)]
    command += map(str, sorted(SOURCES.glob("*.cpp")))
    subprocess.run(command, check=True, timeout=100)
    return library
