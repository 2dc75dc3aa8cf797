"""How the program's own types are cut into rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from brimful import _C

__all__ = ["register_split"]

T = TypeVar("T")


def register_split(
    type: type[T],
    rows_of: Callable[[T], int | None] | None = None,
    slice_rows: Callable[[T, int, int], Any] | None = None,
) -> None:
    """Say how a type of the program's own is cut, wherever brimful cuts a batch, a target or a keyword.

    ``rows_of(object)`` returns its number of rows, or ``None`` for an object that every piece gets whole;
    ``slice_rows(object, begin, end)`` returns the object that has some of them. Without the two, every piece gets the
    type's objects whole. Holds for subclasses, unless they have their own; a second call replaces the first.

    An object that is neither a structure of tensors and NumPy arrays, nor of a registered type, nor plain (numbers,
    text, functions, dtypes, enums and the like) raises ``TypeError`` where it would be cut: it may have rows. For a
    single place, ``None`` in ``batch_dim`` (``kwargs_dim`` for a pipeline's keyword) says that it is whole.
    """
    _C._register_split(type, rows_of, slice_rows)
