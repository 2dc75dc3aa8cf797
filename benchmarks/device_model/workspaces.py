"""Makes the list of cuDNN's workspaces from the recorded steps: python -m benchmarks.device_model.workspaces FILE

FILE is csrc/cuda_sim/cudnn/workspaces.inc. Each step is run once more, with a workspace of a size of its own for each
operation. Beside the recorded events these sizes show where each workspace is, and what its size was there.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.device_model import recorded

VARIABLE = "SIM_CUDA_PROBE_WORKSPACES"


def found_in(here: list[int], there: list[int], probes: set[int]) -> list[tuple[int, int]] | None:
    """Returns each probe among the allocations here with its bytes there, 0 for none; None where they do not match."""
    reach = [[False] * (len(there) + 1) for _ in range(len(here) + 1)]
    reach[-1][-1] = True
    for k in range(len(here) - 1, -1, -1):
        for j in range(len(there), -1, -1):
            goes_on = j < len(there) and reach[k + 1][j + 1]
            if here[k] in probes:
                reach[k][j] = reach[k + 1][j] or goes_on
            else:
                reach[k][j] = goes_on and here[k] == there[j]
    if not reach[0][0]:
        return None
    found, j = [], 0
    for k, size in enumerate(here):
        if size not in probes:
            j += 1
        elif reach[k + 1][j]:
            found.append((size, 0))
        else:
            found.append((size, there[j]))
            j += 1
    return found


def main() -> None:
    rows: dict[tuple[str, str], dict[int, int]] = collections.defaultdict(dict)
    for file in recorded.FILES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ[VARIABLE] = str(Path(folder) / "probes")
            steps = list(recorded.steps([file]))
            path = Path(os.environ[VARIABLE])
            lines = path.read_text().splitlines() if path.exists() else []
        probes = {}
        for line in lines:
            size, count, operation = line.split("\t")
            probes[int(size)] = (operation, int(count))
        for step in steps:
            here, there = (
                [event[1] for event in taken["events"] if event[0] == "a"]
                for taken in (step.here, step.there)
            )
            found = found_in(here, there, set(probes))
            if found is None:
                print(f"left out, for its allocations differ: {step.model}, {step.rows} rows")
                continue
            for size, bytes_there in found:
                operation, count = probes[size]
                of = rows[operation, step.model]
                of[count] = max(of.get(count, 0), bytes_there)
    text = "// Of cuDNN 9.19 on an H200, bytes by rows. Made by benchmarks/device_model/workspaces.py.\n"
    for (operation, model), known in sorted(rows.items()):
        listed = ", ".join(f"{{{count}, {known[count]}}}" for count in sorted(known))
        text += f'SIM_WORKSPACES("{operation}", "{model}", {listed})\n'
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
