"""What an H200 took for whole steps (tools/gpu/recorded), and the same steps on the device without arithmetic."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device_model import device

FILES = sorted((device.ROOT / "tools" / "gpu" / "recorded").glob("steps_*.json.gz"))
TORCH = "2.11.0+cu130"  # which the steps were recorded with
TIMEOUT_S = 900
# Operators for which cuDNN chooses a workspace.
WITH_LIBRARY = ("aten.convolution", "aten._cudnn_rnn", "aten._scaled_dot_product_cudnn_attention")

Cases = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Step:
    """One recorded step and the one here; `library`: whether cuDNN had a workspace to choose in it."""

    model: str
    rows: int
    library: bool
    there: dict[str, Any]
    here: dict[str, Any]

    @property
    def equal(self) -> bool:
        """Whether the allocator's events are the same one for one."""
        return in_order(self.here["events"]) == in_order(self.there["events"])

    def error(self, what: str) -> float:
        """How far `peak_over_base` or `reserved_over_base` is off, as a part of the recorded one."""
        there = self.there[what]
        return (self.here[what] - there) / there if there else float(self.here[what] != 0)

    def total_error(self) -> float:
        """How far the peak of all allocated bytes is off."""
        there, here = (step["base"] + step["peak_over_base"] for step in (self.there, self.here))
        return float((here - there) / there)

    def first_difference(self) -> str:
        """The first event that differs, here and there, and the operator that was at work where that is known."""
        mine, other = in_order(self.here["events"]), in_order(self.there["events"])
        pairs = zip(mine, other, strict=False)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            return "" if self.equal else "one has more events"
        before = sum(event[0] == "a" for event in mine[:at])
        names = [name for began, name in self.here.get("operators", ()) if began <= before]
        return f"event {at}: {mine[at]} here, {other[at]} there{', ' + names[-1] if names else ''}"


def check_torch() -> None:
    """Raises device.Unavailable unless the interpreter has the recorded steps' torch."""
    asked = "import torch; print(torch.__version__)"
    done = subprocess.run(
        [device.python(), "-c", asked], capture_output=True, text=True, timeout=60
    )
    found = done.stdout.strip() or "none"
    if found != TORCH:
        raise device.Unavailable(
            f"the steps were recorded with torch {TORCH} (found: {found}): name a Python that has it by "
            "BRIMFUL_DEVICE_PYTHON"
        )


def in_order(events: list[list[Any]]) -> list[list[Any]]:
    """Returns the events with frees that follow each other sorted: autocast frees its casts in the order of a hash."""
    runs = itertools.groupby(events, key=lambda event: event[0] == "f")
    return [event for is_free, run in runs for event in (sorted(run, key=str) if is_free else run)]


def steps(
    files: list[Path] | None = None, leave_out: str = "", unknown: str = ""
) -> Iterator[Step]:
    """Runs each file's models in a process of their own, as they were recorded, and yields their steps.

    `leave_out`: "size" or "model", whose recorded workspaces are not known (child.py). `unknown`: "least" or "most",
    what such a workspace is taken to be; else it is on the line between the known ones.
    """
    check_torch()
    for file in FILES if files is None else files:
        yield from run(read(file), leave_out, unknown)


def read(file: Path) -> Cases:
    """Returns the recorded steps of a file by their model."""
    with gzip.open(file, "rt") as opened:
        cases: Cases = json.load(opened)["cases"]
    return cases


def run(cases: Cases, leave_out: str = "", unknown: str = "") -> Iterator[Step]:
    """Runs these models in one process, at the sizes of these steps, and yields their steps, whatever torch it has."""
    requests = [
        {
            "model": model,
            "rows": [step["rows"] for step in recorded],
            "named": [step["rows"] for step in recorded if step["ops"] is not None],
            "leave_out": leave_out,
        }
        for model, recorded in cases.items()
    ]
    done = subprocess.run(
        device.command("benchmarks.device_model.child"),
        cwd=device.ROOT,
        env=device.environment() | {"SIM_CUDA_UNKNOWN": unknown},
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = iter([json.loads(line) for line in done.stdout.splitlines()])
    for model, recorded in cases.items():
        library = any(
            operator[0].startswith(WITH_LIBRARY)
            for step in recorded
            for operator in step["ops"] or ()
        )
        for there in recorded:
            here = next(lines, {"error": done.stderr[-300:]})
            if "error" in here:
                raise device.Unavailable(f"{model} with {there['rows']} rows: {here['error']}")
            yield Step(model, there["rows"], library, there, here)
        next(lines, None)
