"""Hugging Face Accelerate: brimful's class in the place of torch's, after ``prepare``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from brimful.integrations._extra import require

require("accelerate")

import torch

import brimful
from brimful.sizer._sharded import roots_of

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["attach"]


def attach(accelerator: Accelerator, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """``model = attach(accelerator, accelerator.prepare(model))``: wrap what torch's class wraps in brimful's.

    ``accelerator.no_sync``, ``accumulate``, ``backward``, ``unwrap_model``, ``save_state`` and ``load_state`` know it.
    The accelerator's ``DistributedDataParallelKwargs`` hold, with their communication hook; ``options`` are those of
    ``brimful.DistributedDataParallel`` and go before them. All ranks call it together. In a single process, where
    ``prepare`` wraps nothing, the model is returned as it is, and so is one that it sharded (``fsdp_version`` 2): that
    is for a ``BatchSizer``. Raises ``TypeError`` for what ``prepare`` did not wrap, or wrapped otherwise.
    """
    if accelerator.num_processes == 1 or roots_of([model]):
        return model
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"only torch's DistributedDataParallel is replaced (type: {type(model)}); pass what "
            "accelerator.prepare(model) returned, without FSDP of version 1 or DeepSpeed, and compile it afterwards"
        )
    handler = accelerator.ddp_handler
    given = handler.to_kwargs() if handler is not None else {}
    wrapped = brimful.DistributedDataParallel(
        model.module, **{"device_ids": model.device_ids, **given, **options}
    )
    if handler is not None:
        handler.register_comm_hook(wrapped)
    accelerator.unwrap_model = functools.partial(_unwrap, accelerator.unwrap_model)
    return wrapped


def _unwrap(plain: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    inner = model.module if isinstance(model, brimful.DistributedDataParallel) else model
    return plain(inner, *args, **kwargs)
