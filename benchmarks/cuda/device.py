"""The device that the figures are measured on: a GPU where there is one, else the simulated one."""

from __future__ import annotations

import importlib.util
import runpy
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import common

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Device:
    """`environment`: what a process needs to see it, beyond this one's."""

    name: str
    simulated: bool
    environment: dict[str, str]


def simulation() -> Path | None:
    """The folder with the simulated device's libraries; none where it is not built."""
    spec = importlib.util.find_spec("brimful")
    if spec is None or spec.origin is None:
        return None
    libraries = Path(spec.origin).with_name("cuda_sim")
    return libraries if (libraries / "libcudart.so.13").exists() else None


def device() -> Device | None:
    """None where there is no GPU and the simulated device is not built."""
    if torch.cuda.is_available():
        return Device(torch.cuda.get_device_name(0), False, {})
    libraries = simulation()
    if libraries is None:
        return None
    found = runpy.run_path(str(ROOT / "csrc/cuda_sim/run.py"))["environment"](libraries)
    names = ("LD_PRELOAD", "SIM_CUDA_STRICT")
    environment = {"SIM_CUDA_MEMORY_MB": "6144", "OMP_NUM_THREADS": "1"}
    return Device("simulated", True, environment | {name: found[name] for name in names})


def count(
    figure_id: str, value: float, here: Device, rounds: int, **known: object
) -> common.Figure:
    """The figure of a number that has no interval."""
    conditions = {**common.machine_conditions(), "device": here.name, **known}
    unit = common.load_ids()[figure_id].unit
    return common.Figure(figure_id, unit, value, value, value, rounds=rounds, conditions=conditions)
