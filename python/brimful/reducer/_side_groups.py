"""Groups of the ranks of another group, over gloo, for a step's ranks to agree over: one for each module."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_groups: weakref.WeakKeyDictionary[torch.nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()
atexit.register(_groups.clear)


def side_group(
    module: torch.nn.Module, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> dist.ProcessGroup:
    """That of the module. The first time it is made, by all `ranks`, with the timeout of `group` on `device`."""
    known: Any = _groups.get(module)
    if known is None:
        backend: Any = group._get_backend(device)
        timeout = backend.options._timeout
        known = dist.new_group(
            list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        _groups[module] = known
    return known  # type: ignore[no-any-return]
