"""Train at the brim: data parallelism in which no rank goes silent, and batches that always fit.

Importing brimful puts its counting allocator in front of torch's CPU allocator (see ``brimful.memory``).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (loads libtorch, which _C finds by its name)

from brimful._build_info import version as __version__
from brimful._compat import check_torch, when_cuda_begins

check_torch()

from brimful import memory
from brimful._C import (
    Attempt,
    BatchTooLarge,
    Explanation,
    HalfStepError,
    Leak,
    LeftOut,
    LoaderAdvice,
    Outcome,
    PlanMismatch,
    RankFailed,
    RankOutOfMemory,
    SplitCheck,
    StoreLost,
    _follow_cuda,
    clear_stop,
    memory_install,
    request_stop,
    stop_exit_code,
    stop_on,
    stop_requested,
)
from brimful._log import connect_logging
from brimful.reducer import DistributedDataParallel
from brimful.sizer import NO_DATA, BatchSizer

if TYPE_CHECKING:
    from brimful import gpus, metrics, monitor, search
    from brimful.checkpoint import load, save_on_rank0
    from brimful.errors import explain, op_ring
    from brimful.finder import find_executable_batch_size
    from brimful.fleet import Fleet, Members
    from brimful.inference import map_batches
    from brimful.leaks import LeakFinder, who_holds
    from brimful.loader import LoaderAdvisor
    from brimful.memory._summary import summary
    from brimful.pipeline import Pipeline, split_sequential
    from brimful.pipeline._balance import balance
    from brimful.pipeline_fleet import PipelineFleet
    from brimful.sampler import GlobalSampler
    from brimful.schedule import Schedule
    from brimful.sizer._by_length import in_batch_order, token_weight
    from brimful.sizer._split_types import register_split
    from brimful.verify import verify_split

memory_install()
when_cuda_begins(_follow_cuda)
connect_logging()

#: For CMake: `-DCMAKE_PREFIX_PATH=$(python -c 'import brimful; print(brimful.cmake_prefix_path)')`.
cmake_prefix_path = os.path.join(os.path.dirname(__file__), "share", "cmake")

__all__ = [
    "NO_DATA",
    "Attempt",
    "BatchSizer",
    "BatchTooLarge",
    "DistributedDataParallel",
    "Explanation",
    "Fleet",
    "GlobalSampler",
    "HalfStepError",
    "Leak",
    "LeakFinder",
    "LeftOut",
    "LoaderAdvice",
    "LoaderAdvisor",
    "Members",
    "Outcome",
    "Pipeline",
    "PipelineFleet",
    "PlanMismatch",
    "RankFailed",
    "RankOutOfMemory",
    "Schedule",
    "SplitCheck",
    "StoreLost",
    "__version__",
    "balance",
    "clear_stop",
    "cmake_prefix_path",
    "explain",
    "find_executable_batch_size",
    "gpus",
    "in_batch_order",
    "load",
    "map_batches",
    "memory",
    "metrics",
    "monitor",
    "op_ring",
    "register_split",
    "request_stop",
    "save_on_rank0",
    "search",
    "split_sequential",
    "stop_exit_code",
    "stop_on",
    "stop_requested",
    "summary",
    "token_weight",
    "verify_split",
    "who_holds",
]


# Loaded when they are asked for, with these names of theirs.
_LATER = {
    "checkpoint": ["load", "save_on_rank0"],
    "errors": ["explain", "op_ring"],
    "finder": ["find_executable_batch_size"],
    "fleet": ["Fleet", "Members"],
    "gpus": [],
    "inference": ["map_batches"],
    "leaks": ["LeakFinder", "who_holds"],
    "loader": ["LoaderAdvisor"],
    "memory._summary": ["summary"],
    "metrics": [],
    "monitor": [],
    "pipeline": ["Pipeline", "split_sequential"],
    "pipeline._balance": ["balance"],
    "pipeline_fleet": ["PipelineFleet"],
    "sampler": ["GlobalSampler"],
    "schedule": ["Schedule"],
    "search": [],
    "sizer._by_length": ["in_batch_order", "token_weight"],
    "sizer._split_types": ["register_split"],
    "verify": ["verify_split"],
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name == module or name in names:
            loaded = importlib.import_module(f"brimful.{module}")
            globals()[name] = loaded if name == module else getattr(loaded, name)
            return globals()[name]
    raise AttributeError(f"module 'brimful' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(name for name in _LATER if "." not in name)})
