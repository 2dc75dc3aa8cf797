"""A loop over batches: what its body has stepped, and a loader that is looked into one batch ahead."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from brimful.loader import LoaderAdvisor

_NONE = object()


class Loop:
    """One that is under way, or was left and is still referred to."""

    def __init__(self, outer: Loop | None) -> None:
        self.outer = outer  #: whose body this one is in
        self.following: Any = None  #: the batch after the one that was handed out
        self.is_announced = (
            False  #: the core knows that batch, and no step has informed the others of it
        )
        self.at_end = False  #: of the last step
        self.begin_body(None)

    def begin_body(self, sampler: Any) -> None:
        self.steps = 0  #: in this body, those that failed too
        self.is_counted = False  #: one of them stood
        self.sampler = sampler  #: to note the outcome of the first one that stands


def without(loop: Loop, innermost: Loop | None) -> Loop | None:
    """The innermost loop once this one is over."""
    if innermost is None or innermost is loop:
        return loop.outer if innermost is loop else None
    inner = innermost
    while inner.outer is not None and inner.outer is not loop:
        inner = inner.outer
    if inner.outer is loop:
        inner.outer = loop.outer
    return innermost


class LookAhead:
    """Fetches a batch before its turn. Meanwhile the loader's state, and what it says of its end, are those of before.

    That is for a loader with ``state_dict`` and ``load_state_dict``, whose ``state_dict`` is replaced on it, and for
    one of accelerate, by whose ``end_of_dataloader`` accelerate decides when it accumulates.
    """

    def __init__(self, loader: Iterable[Any], none: Any) -> None:
        self._none = none
        self._loader = _inmost(loader)
        earlier = getattr(self._loader, "__dict__", {}).get("state_dict")
        if isinstance(earlier, _State):
            earlier.give_back()
        self._source = iter(loader)
        self._state = _State(self._loader) if _is_stateful(self._loader) else None
        self._is_last = False

    def first(self) -> Any:
        return self._fetched()

    def following(self) -> Any:
        """The batch after the one that is handed out now."""
        if self._is_last:  # it said so itself, and goes on to its end when asked for more
            self._loader.end_of_dataloader = True
            if self._state is not None:
                self._state.give_back()
            return self._none
        if self._state is not None and not self._state.keep():
            self._state = None
        return self._fetched()

    def end(self) -> None:
        """After the last body."""
        if self._is_last:
            next(self._source, None)
        if self._state is not None:
            self._state.give_back()

    def leave(self) -> None:
        """Before it: the loader is still one batch ahead."""
        if self._state is not None:
            self._state.leave()

    def _fetched(self) -> Any:
        batch = next(self._source, self._none)
        if batch is not self._none and getattr(self._loader, "end_of_dataloader", False) is True:
            self._is_last = True
            self._loader.end_of_dataloader = False
        return batch


class _State:
    """In the place of a loader's ``state_dict``."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._own = loader, loader.state_dict
        self._before = loader.__dict__.get("state_dict", _NONE)
        self._kept: Any = None
        self._ahead: tuple[Any, Any] | None = (
            None  # what is true of it while nobody has gone on with it
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._ahead is not None:
            iterator, state = self._ahead
            now = self._own(*args, **kwargs)
            if _iterator_of(self._loader) is not iterator or not _alike(now, state):
                self.give_back()
                return now
        return self._kept

    def keep(self) -> bool:
        """False for a loader that has no state after all, as accelerate's has none of a plain one."""
        try:
            self._kept = copy.deepcopy(self._own())
        except Exception:  # the program gets it where it asks itself
            self.give_back()
            return False
        self._loader.state_dict = self
        return True

    def leave(self) -> None:
        if self._loader.__dict__.get("state_dict") is self:
            self._ahead = _iterator_of(self._loader), copy.deepcopy(self._own())

    def give_back(self) -> None:
        if self._loader.__dict__.get("state_dict") is not self:
            return
        if self._before is _NONE:
            del self._loader.state_dict
        else:
            self._loader.state_dict = self._before


def _inmost(loader: Any) -> Any:
    while isinstance(loader, LoaderAdvisor):
        loader = loader.loader
    return loader


def _is_stateful(loader: Any) -> bool:
    """Where a method can be replaced."""
    methods = (getattr(loader, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and hasattr(loader, "__dict__")


def _iterator_of(loader: Any) -> Any:
    """Of torchdata's loader, or of the one inside accelerate's; another one where it has begun again."""
    inner = getattr(loader, "base_dataloader", loader)
    return getattr(inner, "_iterator", None)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    try:
        return bool(one == other)
    except Exception:  # of arrays, say
        return False
