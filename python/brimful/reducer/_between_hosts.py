"""Ranks that agree on their steps between hosts, over a gloo group of their own, and not in the last bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brimful import _C


@contextmanager
def between_hosts(on: bool = True) -> Iterator[None]:
    """What this process wraps in it sends its control records between hosts, if all ranks do and can, or never."""
    before = _C._set_between_hosts(on)
    try:
        yield
    finally:
        _C._set_between_hosts(before)
