"""A loop over batches: what its body has stepped, and a loader that is looked into one batch ahead."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from brimful._process_end import is_out_of_memory, mark_reported, text_of
from brimful.loader import LoaderAdvisor
from brimful.sampler import global_sampler_of

Batch = TypeVar("Batch")
_NONE = object()


class NoData:
    """What a rank passes to ``step`` when its data has ended and that of others has not."""

    __module__ = "brimful.sizer"  # where a pickled one is looked for

    def __repr__(self) -> str:
        return "brimful.NO_DATA"

    def __reduce__(self) -> str:
        return "NO_DATA"


NO_DATA = NoData()


def _announced(batch: Any) -> Any:
    """The batch as the core takes it: `None` is no data there, and a batch that is none is a bad one."""
    return None if batch is NO_DATA else () if batch is None else batch


class _Core(Protocol):
    """What a loop asks of what steps."""

    @property
    def steps(self) -> int: ...
    @property
    def at_end(self) -> bool: ...
    @property
    def expects_step(self) -> bool: ...
    def begin_loop(self, first: object | None) -> bool: ...
    def announce_next(self, next: object | None) -> None: ...
    def report_failure(self, out_of_memory: bool, text: str) -> None: ...


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

    def note_step(self, at_end: bool) -> None:
        """One that failed too."""
        self.steps += 1
        self.at_end = at_end


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


class Looping:
    """Steps in loops over data of which each rank may have another amount."""

    _core: _Core
    _named: ClassVar[str]  #: in texts
    _loop: Loop | None = None  #: the innermost one that is under way
    _loops = 0  #: whose bodies were left

    def _counted(self, batch: Any) -> Any:
        """The batch as the core counts its rows."""
        return batch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch | NoData]:
        """Yield the loader's batches, then ``NO_DATA`` while other ranks have some.

        All ranks leave the loop after the same step. Looks one batch ahead, and begins with one
        exchange between the ranks. Every batch must be given to ``step``, once or, on all ranks alike, several times;
        a loop may be in the body of another one. A ``GlobalSampler`` that is the loader's ``batch_sampler`` notes the
        outcome of each. The state of a loader that has one, such as torchdata's ``StatefulDataLoader``, is that of the
        batch in the body, not of the one ahead, until the loader goes on.
        """
        core = self._core
        if self._loop is None and self._loops > 0 and core.expects_step:
            # The loop before was left: by all ranks, or the others wait in its next step.
            core.report_failure(False, "it left its loop over data and began another one")
        loops = 0 if self._loop is None else self._loops
        loop, sampler, ahead = Loop(self._loop), None, None
        following: Any = None
        error: BaseException | None = None
        try:
            sampler = global_sampler_of(loader)
            ahead = LookAhead(loader, NO_DATA)
            following = ahead.first()
        except BaseException as caught:
            error = caught
        any_rank = core.begin_loop(self._counted(_announced(following)))
        if loop.outer is not None:
            loop.outer.is_announced = False
        if error is not None:
            self._fail(error)
        assert ahead is not None
        self._loops, self._loop = loops + any_rank, loop
        try:
            while any_rank:
                current = following
                loop.begin_body(sampler)
                following = self._look(ahead, loop, current)
                yield current
                if loop.steps == 0:
                    raise RuntimeError(
                        f"a batch was left out (steps: {core.steps}); call {self._named}.step for every batch"
                    )
                if (
                    loop.sampler is not None
                ):  # the step failed on all ranks, and the program goes on
                    loop.sampler.note(None)
                any_rank = not loop.at_end
            self._loops = loops
            if following is NO_DATA:  # else the ranks stop before their data ends
                ahead.end()
        finally:
            self._loop = without(loop, self._loop)
            ahead.leave()

    def _look(self, ahead: LookAhead, loop: Loop, current: Any) -> Any:
        """The batch after this one, of which the next step informs the other ranks."""
        try:
            loop.following = ahead.following() if current is not NO_DATA else NO_DATA
        except BaseException as caught:
            self._fail(caught)
        self._announce(loop)
        return loop.following

    def _announce(self, loop: Loop) -> None:
        self._core.announce_next(self._counted(_announced(loop.following)))
        loop.is_announced = True

    def _entered_loop(self) -> Loop | None:
        """The loop that a step of it begins in: each says whether there is a batch after it."""
        loop = self._loop
        if loop is not None:
            if not loop.is_announced:
                self._announce(loop)
            loop.is_announced = False
        return loop

    def _fail(self, error: BaseException) -> None:
        """Inform the other ranks, which wait in their next step; none does after the last one."""
        self._core.report_failure(is_out_of_memory(error), text_of(error))
        mark_reported(error)
        raise error


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
