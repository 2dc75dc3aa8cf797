"""What is wrong with a pipeline's arguments, by their names and values."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brimful import _C
from brimful.reducer._wrapping import member_of

_MOST = 2**31 - 1


def whole_number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number ({name}: {value!r}); pass an int") from None
    if not least <= number <= _MOST:
        raise ValueError(f"{name} must be between {least} and {_MOST} ({name}: {number})")
    return number


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string ({name}: {value!r})")
    return value


def function(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable ({name}: {value!r})")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict by name ({name}: {value!r})")
    return {text(f"a key of {name}", key): entry for key, entry in (value or {}).items()}


def group(value: Any) -> Any:
    return None if value is None else member_of(value)


def stages(value: Any) -> list[Any]:
    if isinstance(value, torch.nn.Module) and not hasattr(value, "__iter__"):
        raise TypeError(
            f"stages must be a sequence of modules or functions (type: {type(value)}); "
            "cut the model with split_sequential, or pass its parts in a list"
        )
    try:
        found = list(value)
    except TypeError:
        raise TypeError(
            f"stages must be a sequence of modules or functions (stages: {value!r})"
        ) from None
    if not found:
        raise ValueError("a pipeline has at least one stage (stages: 0)")
    return found


def recomputed(value: Any) -> list[int] | None:
    """Numbers of stages; None: all."""
    if isinstance(value, str):
        if value != "all":
            raise ValueError(
                f"recompute is 'all', or a list of stages' numbers (recompute: {value!r})"
            )
        return None
    try:
        return [whole_number("a stage to recompute", stage, 0) for stage in value]
    except TypeError:
        raise TypeError(
            f"recompute is 'all', or a list of stages' numbers (recompute: {value!r})"
        ) from None


def schedule(value: Any) -> Any:
    """A name, a ``Schedule``, or a function, whose result is checked when it is called."""
    if isinstance(value, (str, _C.Schedule)):
        return value
    if not callable(value):
        raise TypeError(
            "schedule must be a name, a Schedule, or a function of a number of microbatches "
            f"(schedule: {value!r})"
        )

    def made(microbatches: int) -> _C.Schedule:
        found = value(microbatches)
        if not isinstance(found, _C.Schedule):
            raise TypeError(
                f"the function that makes schedules returned no Schedule (type: {type(found)}); return a Schedule"
            )
        return found

    return made


def copies_of(tied: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors that each name of ``tied`` has, one or several."""
    found = []
    for name, given in mapping("tied", tied).items():
        copies = [given] if isinstance(given, torch.Tensor) else given
        if not isinstance(copies, Sequence) or not all(isinstance(c, torch.Tensor) for c in copies):
            raise TypeError(
                f"tied has a parameter, or a sequence of them, for each name ({name}: {given!r})"
            )
        found += [(name, copy) for copy in copies]
    return found


def balance(value: Any) -> list[int]:
    try:
        return [operator.index(count) for count in value]
    except TypeError:
        raise TypeError(
            f"balance must be a sequence of whole numbers (balance: {value!r}); pass how many layers each stage has"
        ) from None
