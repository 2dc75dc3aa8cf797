"""An optimizer makes no step of gradients whose sums have failed on the device."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from brimful import _C
from brimful._compat import skipped_by_dynamo

if TYPE_CHECKING:
    from brimful.reducer import DistributedDataParallel

_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def guard_optimizers_of(wrapper: DistributedDataParallel) -> None:
    """From now on ``step`` of an optimizer of its parameters raises ``RankFailed`` if sums of theirs have failed.

    It waits for no device: of sums that fail later the next step says so.
    """
    _wrappers.add(wrapper)
    _begin()


@functools.cache
def _begin() -> None:
    register_optimizer_step_pre_hook(_require_sums)


@skipped_by_dynamo
def _require_sums(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for wrapper in list(_wrappers):
        try:
            if wrapper._reducer is not None:
                wrapper._reducer.require_sums()
        except _C.RankFailed:
            if _shares(optimizer, wrapper):
                raise


def _shares(optimizer: Optimizer, wrapper: DistributedDataParallel) -> bool:
    own = {id(p) for p in wrapper.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])
