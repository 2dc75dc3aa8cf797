"""Train at the brim: data parallelism in which no rank goes silent, and batches that always fit.

Importing brimful puts its counting allocator in front of torch's CPU allocator (see ``brimful.memory``).
"""

from __future__ import annotations

import os

import torch  # noqa: F401  (loads libtorch, which _C finds by its name)

from brimful._build_info import version as __version__
from brimful._compat import check_torch

check_torch()

from brimful import memory
from brimful._C import (
    Attempt,
    BatchTooLarge,
    HalfStepError,
    Outcome,
    PipelineOutcome,
    PlanMismatch,
    RankFailed,
    RankOutOfMemory,
    SplitCheck,
    memory_install,
)
from brimful._log import connect_logging
from brimful.checkpoint import load, save_on_rank0
from brimful.finder import find_executable_batch_size
from brimful.inference import map_batches
from brimful.pipeline import Pipeline, split_sequential
from brimful.reducer import DistributedDataParallel
from brimful.schedule import Schedule
from brimful.sizer import NO_DATA, BatchSizer
from brimful.verify import verify_split

memory_install()
connect_logging()

#: For CMake: `-DCMAKE_PREFIX_PATH=$(python -c 'import brimful; print(brimful.cmake_prefix_path)')`.
cmake_prefix_path = os.path.join(os.path.dirname(__file__), "share", "cmake")

__all__ = [
    "NO_DATA",
    "Attempt",
    "BatchSizer",
    "BatchTooLarge",
    "DistributedDataParallel",
    "HalfStepError",
    "Outcome",
    "Pipeline",
    "PipelineOutcome",
    "PlanMismatch",
    "RankFailed",
    "RankOutOfMemory",
    "Schedule",
    "SplitCheck",
    "__version__",
    "cmake_prefix_path",
    "find_executable_batch_size",
    "load",
    "map_batches",
    "memory",
    "save_on_rank0",
    "split_sequential",
    "verify_split",
]
