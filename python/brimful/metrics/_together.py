"""What several ``Metrics`` of a process share: places, with a name for each, and exporters, which the last one ends."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from brimful.metrics import Metrics

T = TypeVar("T")


class _Forgetful(Protocol):
    def forget(self) -> object:
        """Called in a fork of the process: what it knows is of its parent."""


_lock = threading.RLock()
_running: weakref.WeakSet[Metrics] = weakref.WeakSet()
_forgetful: weakref.WeakSet[Any] = weakref.WeakSet()


def running() -> list[Metrics]:
    with _lock:
        return list(_running)


def enter(metrics: Metrics) -> None:
    """Give it a name that no other has in the same place, and close those there that nothing comes from any more."""
    with _lock:
        _running.add(metrics)
    for other in _beside(metrics):
        if other._observed() is None:
            other.close()
    with _lock:
        alike = (o for o in _beside(metrics) if (o._job, o._rank) == (metrics._job, metrics._rank))
        taken = {other._name for other in alike}
        given = metrics._name
        numbered = (f"{given}-{n}" if given else str(n) for n in itertools.count(2))
        metrics._name = next(n for n in itertools.chain([given], numbered) if n not in taken)


def leave(metrics: Metrics) -> list[Any]:
    """The exporters that no other uses now."""
    with _lock:
        _running.discard(metrics)
        used = {id(exporter) for other in _running for exporter in other._exporters}
        return [exporter for exporter in metrics._exporters if id(exporter) not in used]


def _beside(metrics: Metrics) -> list[Metrics]:
    places = _places(metrics)
    others = (other for other in running() if other is not metrics and not other._closed)
    return [other for other in others if places & _places(other)]


def _places(metrics: Metrics) -> set[Hashable]:
    """Files, registries, meters and runs that it writes to. Exporters may share these, and ``Metrics`` an exporter."""
    found: set[Hashable] = {id(exporter) for exporter in metrics._exporters}
    for exporter in metrics._exporters:
        found.update(getattr(exporter, "_places", ()))
    return found


def shared(table: weakref.WeakKeyDictionary[Any, T], of: Any, make: Callable[[], T]) -> T:
    """What the exporters of one registry, meter or run have in common; each its own where that cannot be a key."""
    with _lock:
        try:
            found = table.get(of)
            if found is None:
                found = table[of] = make()
        except TypeError:
            return make()
        return found


def forgets_in_forks(what: _Forgetful) -> None:
    _forgetful.add(what)


def _in_a_fork() -> None:
    global _lock
    _lock = threading.RLock()  # which a thread of the parent may have held
    _running.clear()
    for what in list(_forgetful):
        what.forget()


os.register_at_fork(after_in_child=_in_a_fork)
