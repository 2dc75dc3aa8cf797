"""Wrappers of one model beside each other: a process each, in turn, so that what slows the machine slows all."""

from __future__ import annotations

import collections
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks import intervals
from tools.gpu.catalogue import ROOT
from tools.gpu.racer import WRAPPERS
from torch import nn

SETTLE_STEPS = 100  # in which a planner tries caps; the others get some
WARM_UP_STEPS = 10
PROFILED_STEPS = 3


class Ended(Exception):
    """A wrapper's process ended; the message has its last words."""


class Racer:
    """A wrapper's process, as it is asked."""

    def __init__(self, case: str, wrapper: str, small: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "errors"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.gpu.racer", case, wrapper, *["--small"] * small],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def answer(self) -> dict[str, Any]:
        """What it says next. Raises Ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Ended(
                self._errors.read_text(errors="replace")[-600:].strip() or "it said nothing"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, command: str) -> dict[str, Any]:
        """Its answer to `command`. Raises Ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.answer()

    def end(self) -> None:
        """Ends the process, and its part of the device with it."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def wrappers() -> list[str]:
    """Those that this torch has."""
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    return [w for w in WRAPPERS if w != "torch, batched copies" or "batched_grad_copy" in known]


def race(
    case: str, names: Sequence[str], rounds: int, steps: int, small: bool = False
) -> dict[str, Any]:
    """Times `steps` steps of each wrapper in each of `rounds` rounds, then profiles each.

    Raises Ended where a wrapper's process ends, for want of memory say.
    """
    racers = {name: Racer(case, name, small) for name in names}
    try:
        parameters = {name: racer.answer()["parameters"] for name, racer in racers.items()}
        for name, racer in racers.items():
            settle = SETTLE_STEPS if name == "brimful" else WARM_UP_STEPS
            racer.ask(f"steps {2 if small else settle}")
        times: dict[str, list[float]] = {name: [] for name in names}
        host: dict[str, list[float]] = {name: [] for name in names}
        for round in range(rounds):
            for name in _order(list(names), round):
                found = racers[name].ask(f"steps {steps}")
                times[name].append(found["ms"])
                host[name].append(found["host_ms"])
        count = 1 if small else PROFILED_STEPS
        profiles = {name: racer.ask(f"profile {count}") for name, racer in racers.items()}
    finally:
        for racer in racers.values():
            racer.end()
    return {
        "case": case,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0),
        "parameters": parameters[names[0]],
        "rounds": rounds,
        "steps_a_round": steps,
        "ms": {name: _rounded(ms) for name, ms in times.items()},
        "median_ms": {name: intervals.median(ms) for name, ms in times.items()},
        "median_host_ms": {name: intervals.median(ms) for name, ms in host.items()},
        "overhead": _overheads(times),
        "profile": profiles,
    }


def _order(names: list[str], round: int) -> list[str]:
    """Each rotation forwards and then backwards, to change neighbours."""
    start = round // 2 % len(names)
    rotated = names[start:] + names[:start]
    return rotated[::-1] if round % 2 else rotated


def _rounded(ms: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in ms]


def best_of_torch(median_ms: dict[str, float]) -> str:
    """The fastest of torch's settings."""
    return min((name for name in median_ms if name.startswith("torch")), key=median_ms.__getitem__)


def _overheads(times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """(ours - bare) / (torch's best - bare), with its 95 % interval; a reason where torch costs nothing that shows."""
    medians = {name: intervals.median(ms) for name, ms in times.items()}
    found: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    best = best_of_torch(medians)
    for name in times:
        if not name.startswith("brimful"):
            continue
        found[name]["peer"] = best
        try:
            ratio = intervals.overhead_ratio(times[name], times[best], times["bare"])
            found[name] |= {"value": ratio.value, "low": ratio.low, "high": ratio.high}
        except intervals.NotResolved as error:
            found[name] |= {"value": None, "reason": str(error)}
        step = intervals.median_ratio(times[name], times[best])
        found[name]["step"] = {"value": step.value, "low": step.low, "high": step.high}
    return dict(found)
