"""Writes what the programs do on the simulated device: run.py ... -- python -m tools.gpu.record (csrc/cuda_sim)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tools.gpu import programs
from tools.gpu.device import SIMULATED

FILE = Path(__file__).parent / "recorded.json"


def main() -> int:
    """A line for each event."""
    if not SIMULATED:
        print("what is recorded is the simulated device's: run it there (csrc/cuda_sim/run.py)")
        return 1
    torch.cuda.init()
    lines = []
    for name in programs.PROGRAMS:
        rows = ",\n  ".join(json.dumps([event, *c.values()]) for event, c in programs.events(name))
        lines.append(f' "{name}": [\n  {rows}]')
    names = json.dumps(["event", *programs.COUNTERS])
    FILE.write_text(
        f'{{"torch": "{torch.__version__}", "columns": {names}, "programs": {{\n'
        + ",\n".join(lines)
        + "}}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
