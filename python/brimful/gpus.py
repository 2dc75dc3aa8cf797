"""GPUtil's functions and names, read through NVML instead of a subprocess of nvidia-smi.

Change ``import GPUtil`` to ``from brimful import gpus as GPUtil``. Memory is in MiB, load and memoryUtil are from 0 to
1, and what the driver does not report is ``nan`` (for texts: ""). GPUs are numbered as nvidia-smi does. A divided GPU
(MIG) counts as one. ``load`` is the share of time in which any kernel ran: it is not occupancy.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

from brimful.monitor import gpus as _read

__all__ = [
    "GPU",
    "getAvailability",
    "getAvailable",
    "getFirstAvailable",
    "getGPUs",
    "showUtilization",
]

_MIB = 1 << 20
_Columns = Sequence[Sequence[dict[str, Any]]]


class GPU:
    """One GPU, with GPUtil's attributes."""

    def __init__(
        self,
        ID: int,
        uuid: str,
        load: float,
        memoryTotal: float,
        memoryUsed: float,
        memoryFree: float,
        driver: str,
        gpu_name: str,
        serial: str,
        display_mode: str,
        display_active: str,
        temp_gpu: float,
    ) -> None:
        self.id = ID
        self.uuid = uuid
        self.load = load
        self.memoryUtil = memoryUsed / memoryTotal if memoryTotal > 0 else math.nan
        self.memoryTotal = memoryTotal
        self.memoryUsed = memoryUsed
        self.memoryFree = memoryFree
        self.driver = driver
        self.name = gpu_name
        self.serial = serial
        self.display_mode = display_mode
        self.display_active = display_active
        self.temperature = temp_gpu


def getGPUs() -> list[GPU]:
    """All GPUs of this machine, none where there is no driver. A lost GPU is there, with nan for its numbers."""
    report = _read()
    return [
        GPU(
            ID=gpu["index"],
            uuid=gpu["uuid"],
            load=_number(gpu["busy"]),
            memoryTotal=_mib(gpu["total_bytes"]),
            memoryUsed=_mib(gpu["used_bytes"]),
            memoryFree=_mib(gpu["free_bytes"]),
            driver=report["driver"],
            gpu_name=gpu["name"],
            serial=gpu["serial"],
            display_mode=_enabled(gpu["display_mode"]),
            display_active=_enabled(gpu["display_active"]),
            temp_gpu=_number(gpu["temperature_c"]),
        )
        for gpu in report["gpus"]
        if gpu["mig_index"] is None
    ]


def getAvailability(
    GPUs: Sequence[GPU],
    maxLoad: float = 0.5,
    maxMemory: float = 0.5,
    memoryFree: float = 0,
    includeNan: bool = False,
    excludeID: Sequence[int] = (),
    excludeUUID: Sequence[str] = (),
) -> list[int]:
    """1 for each GPU whose load and memory are below the limits, else 0. ``memoryFree``: at least so many MiB."""

    def below(value: float, limit: float) -> bool:
        return value < limit or (includeNan and math.isnan(value))

    def available(gpu: GPU) -> bool:
        room = memoryFree <= 0 or gpu.memoryFree >= memoryFree
        excluded = gpu.id in excludeID or gpu.uuid in excludeUUID
        return (
            below(gpu.load, maxLoad) and below(gpu.memoryUtil, maxMemory) and room and not excluded
        )

    return [int(available(gpu)) for gpu in GPUs]


def getAvailable(
    order: str = "first",
    limit: float = 1,
    maxLoad: float = 0.5,
    maxMemory: float = 0.5,
    memoryFree: float = 0,
    includeNan: bool = False,
    excludeID: Sequence[int] = (),
    excludeUUID: Sequence[str] = (),
) -> list[int]:
    """Ids of at most ``limit`` available GPUs, by ``order``: "first", "last", "random", "load" or "memory"."""
    gpus = getGPUs()
    free = getAvailability(gpus, maxLoad, maxMemory, memoryFree, includeNan, excludeID, excludeUUID)
    gpus = [gpu for gpu, available in zip(gpus, free, strict=True) if available]
    if order == "last":
        gpus.reverse()
    elif order == "random":
        random.shuffle(gpus)
    elif order == "load":
        gpus.sort(key=lambda gpu: _nan_last(gpu.load))
    elif order == "memory":
        gpus.sort(key=lambda gpu: _nan_last(gpu.memoryUtil))
    elif order != "first":
        raise ValueError(f"no such order (order: {order}); use first, last, random, load or memory")
    return [gpu.id for gpu in gpus[: int(min(limit, len(gpus)))]]


def getFirstAvailable(
    order: str = "first",
    maxLoad: float = 0.5,
    maxMemory: float = 0.5,
    attempts: int = 1,
    interval: float = 900,
    verbose: bool = False,
    includeNan: bool = False,
    excludeID: Sequence[int] = (),
    excludeUUID: Sequence[str] = (),
) -> list[int]:
    """The id of one available GPU, in a list. Tries ``attempts`` times, ``interval`` seconds apart, or RuntimeError."""
    for attempt in range(attempts):
        if verbose:
            print(f"Looking for an available GPU ({attempt + 1}/{attempts})")
        found = getAvailable(order, 1, maxLoad, maxMemory, 0, includeNan, excludeID, excludeUUID)
        if found:
            if verbose:
                print(f"GPU {found} is available")
            return found
        if attempt + 1 < attempts:
            time.sleep(interval)
    raise RuntimeError(
        f"Could not find an available GPU after {attempts} attempts with {interval} seconds interval."
    )


def _percent(value: float) -> float:
    return value * 100


_SHORT: _Columns = [
    [
        {"attr": "id", "name": "ID"},
        {"attr": "load", "name": "GPU", "suffix": "%", "transform": _percent, "precision": 0},
        {"attr": "memoryUtil", "name": "MEM", "suffix": "%", "transform": _percent, "precision": 0},
    ]
]
_ALL: _Columns = [
    [
        {"attr": "id", "name": "ID"},
        {"attr": "name", "name": "Name"},
        {"attr": "serial", "name": "Serial"},
        {"attr": "uuid", "name": "UUID"},
    ],
    [
        {"attr": "temperature", "name": "GPU temp.", "suffix": "C", "precision": 0},
        {"attr": "load", "name": "GPU util.", "suffix": "%", "transform": _percent, "precision": 0},
        {
            "attr": "memoryUtil",
            "name": "Memory util.",
            "suffix": "%",
            "transform": _percent,
            "precision": 0,
        },
    ],
    [
        {"attr": "memoryTotal", "name": "Memory total", "suffix": "MB", "precision": 0},
        {"attr": "memoryUsed", "name": "Memory used", "suffix": "MB", "precision": 0},
        {"attr": "memoryFree", "name": "Memory free", "suffix": "MB", "precision": 0},
    ],
    [
        {"attr": "display_mode", "name": "Display mode"},
        {"attr": "display_active", "name": "Display active"},
    ],
]


def showUtilization(
    all: bool = False, attrList: _Columns | None = None, useOldCode: bool = False
) -> None:
    """Print a table. ``attrList``: groups of ``{"attr", "name"}`` with ``suffix``, ``transform`` and ``precision``."""
    groups = _ALL if all else attrList if attrList is not None else _SHORT
    gpus = getGPUs()
    lines = [""] * (len(gpus) + 1)
    for group in groups:
        for column in group:
            cells = [str(column["name"]), *(_cell(gpu, column) for gpu in gpus)]
            width = max(map(len, cells))
            for row, cell in enumerate(cells):
                text = isinstance(getattr(gpus[row - 1], column["attr"]), str) if row else True
                lines[row] += f"| {cell.ljust(width) if text else cell.rjust(width)} "
        lines = [line + "|" for line in lines]
    print("\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]))


def _cell(gpu: GPU, column: dict[str, Any]) -> str:
    value = column.get("transform", lambda value: value)(getattr(gpu, column["attr"]))
    precision = column.get("precision")
    text = (
        f"{value:.{precision}f}"
        if isinstance(value, float) and precision is not None
        else str(value)
    )
    return text + str(column.get("suffix", ""))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _mib(value: int | None) -> float:
    return math.nan if value is None else value // _MIB * 1.0


def _enabled(value: bool | None) -> str:
    return "" if value is None else "Enabled" if value else "Disabled"


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
