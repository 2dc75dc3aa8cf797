"""A state that is saved holds no update whose sums have failed on the device."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brimful.reducer import DistributedDataParallel


class BeforeSaving:
    """Waits, before a module's ``state_dict``, for the sums of its wrapper's steps; a copy of the module does not.

    Raises ``RankFailed`` if the sums of a step have failed.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(self, module: Any, prefix: str, keep_vars: bool) -> None:
        wrapper = self._wrapper()
        if wrapper is not None and wrapper._reducer is not None:
            wrapper._reducer.wait_for_sums()

    def __reduce__(self) -> tuple[Any, ...]:
        # A module that is pickled is read where there is no brimful, too: `slice` takes three arguments as well.
        return functools.partial, (slice,)
