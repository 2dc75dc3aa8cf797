"""A single rank that makes its collectives too, for measurements and tests; without it there are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brimful import _C


@contextmanager
def whole_path() -> Iterator[None]:
    """What this thread wraps in it makes the collectives of a single rank too."""
    before = _C._set_whole_path(True)
    try:
        yield
    finally:
        _C._set_whole_path(before)
