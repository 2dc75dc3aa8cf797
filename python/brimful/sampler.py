"""Batches of the whole job, of which each rank takes as many rows as it is fast."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler, default_collate

from brimful import _C
from brimful.loader import LoaderAdvisor

__all__ = ["GlobalSampler"]


class GlobalSampler(Sampler[list[int]]):
    """A batch sampler of the whole job: each rank takes a share of every batch that follows how fast it was.

    ::

        sampler = brimful.GlobalSampler(data, batch_size=512, lag=2 * 2 + 2)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=2)
        for batch in sizer.batches(loader):
            sizer.step(batch, loss_fn)

    ``data`` is a data set or its number of rows, and ``batch_size`` that of all ranks together: a step is the next so
    many rows of a permutation that all ranks have (``seed`` and epoch choose it; ``shuffle=False`` keeps the order). In
    every epoch each row goes to exactly one rank, and a ``BatchSizer``'s gradient is the exact mean over the batch
    whatever the shares are. They follow from ``Outcome.work_ms``, which all ranks have of each step: there is no
    collective more. They change where the slowest rank is predicted to need at least 5 % less time then.

    ``lag``: the share of a step follows the outcomes up to ``lag`` steps before it, since loaders fetch ahead. Pass
    ``num_workers * prefetch_factor + 2`` of the loader (2 without workers); ``ValueError`` says where it is too small.

    ``BatchSizer.batches(loader)`` notes each step's outcome by itself; in another loop call ``note(outcome)`` on all
    ranks once for each step, also those in which this rank had no batch: where an epoch's last step has fewer rows than
    there are ranks, the last ranks have one batch less (``drop_last=True`` leaves out rows that are no whole batch).

    ``cost`` has a whole number for each row, such as its tokens: a sequence, an array or a tensor. With it a step is
    the next rows that cost at most ``batch_cost`` together, and shares follow from costs in the place of rows::

        sampler = brimful.GlobalSampler(data, cost=tokens, batch_cost=65536)

    A rank's time is its speed times the sum of ``cost + cost**2 / crossover`` over its rows, and the crossover follows
    from measured times. A step's rows are in order of cost, the most costly first, and each rank has some that are next
    to each other: alike in length, so that padding is small. A step has ``min_rows`` rows for each rank even where they
    cost more than ``batch_cost``, such as a row that does by itself, and no more rows than ``max_rows`` allows. An
    epoch's last step is a whole batch where it costs ``batch_cost``.

    ``min_rows`` is each rank's least share of a whole batch, ``max_rows`` its largest: a number for each rank, where
    the memory of one allows no more. Ranks whose time is not known keep their share.

    A pass begins after the last step that was noted, and the next epoch where that was the epoch's last one;
    ``set_epoch`` begins another one. ``load(rows)`` makes a batch of rows by itself, with ``collate_fn`` (torch's
    default one). ``rank`` and ``world_size`` are torch.distributed's unless given, and follow it where its group is
    reconfigured (torch 2.15 and later): what was not noted by then is cut anew in the next pass.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        batch_size: int | None = None,
        cost: Any = None,
        batch_cost: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        lag: int = 2,
        min_rows: int = 1,
        max_rows: Sequence[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self._configuration = _configuration()
        self._follows = rank is None and world_size is None and self._configuration != ""
        size = _rows_of(data)
        if size < 0:
            raise ValueError(f"a data set has no negative number of rows (rows: {size})")
        batch = batch_size if batch_cost is None else batch_cost
        one = (cost is None) == (batch_cost is None) and (cost is None) != (batch_size is None)
        if batch is None or not one:
            raise ValueError(
                "a sampler needs batch_size, or cost and batch_cost, and not both (batch_size: "
                f"{batch_size}, cost: {'None' if cost is None else 'given'}, batch_cost: {batch_cost})"
            )
        self._size, self._batch_size = size, operator.index(batch)
        self._data = None if isinstance(data, int) else data
        self._collate, self._shuffle = collate_fn, shuffle
        self._limited = bool(max_rows)
        self._core = _C._GlobalSampler(
            size=size,
            batch_size=self._batch_size,
            cost=None if cost is None else _tensor_of(cost),
            rank=rank if rank is not None else dist.get_rank() if grouped else 0,
            world_size=(
                world_size if world_size is not None else dist.get_world_size() if grouped else 1
            ),
            shuffle=shuffle,
            seed=operator.index(seed) % (1 << 64),
            drop_last=drop_last,
            lag=lag,
            min_rows=min_rows,
            max_rows=list(max_rows or ()),
        )

    def __iter__(self) -> Iterator[list[int]]:
        # A loader with workers makes two iterators and uses one: a pass begins when it is asked for rows.
        self._follow(begins=True)
        self._core.reset()
        while (rows := self._core.next()) is not None:
            yield rows
            self._follow()

    def _follow(self, *, begins: bool = False) -> None:
        """Go on among the members that torch's group has now."""
        if not self._follows or _configuration() == self._configuration:
            return
        if self._core.handed_out > 0 and not begins:
            raise RuntimeError(
                "the process group was reconfigured while steps were handed out that have the ranks of before (steps "
                f"that were not noted: {self._core.handed_out}); leave this loop over the sampler or its loader and "
                "begin another one, which goes on after the last step that was noted"
            )
        if self._limited:
            raise RuntimeError(
                "the process group was reconfigured, and max_rows is that of its ranks before (max_rows: given); call "
                "sampler.regroup(rank, world_size, max_rows=...) on all ranks"
            )
        self.regroup(dist.get_rank(), dist.get_world_size())

    def load(self, rows: Sequence[int]) -> Any:
        """The batch of these rows of the data set, as a ``DataLoader`` without workers makes it."""
        if self._data is None:
            raise ValueError(
                "the sampler has a number of rows and no data set to load them from; pass the data set"
            )
        data: Any = self._data
        many = getattr(data, "__getitems__", None)
        loaded = many(list(rows)) if many else [data[row] for row in rows]
        return (self._collate or default_collate)(loaded)

    def stream(
        self, data: Iterable[Any], *, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> Iterable[Any]:
        """A loader of a data set without row numbers, such as an ``IterableDataset``, for ``BatchSizer.batches``.

        Every rank reads the same stream in the same order, and keeps the rows of its shares: the order cannot be
        permuted (``shuffle=False``), and a resumed job reads past what was done. ``data`` yields a row at a time, at
        least as many as the sampler was given as their number; ``ValueError`` says where it ends before.
        """
        return _Stream(self, data, collate_fn or self._collate or default_collate)

    def regroup(self, rank: int, world_size: int, *, max_rows: Sequence[int] | None = None) -> None:
        """Go on among other ranks: what was handed out and not noted is cut anew among them, by even shares.

        All ranks call it, after the same step. What a loader has fetched ahead is of the old shares: throw it away.
        ``max_rows`` is that of the new ranks.
        """
        self._core.regroup(rank, world_size, list(max_rows or ()))
        self._limited = bool(max_rows)
        self._configuration = _configuration()

    def __len__(self) -> int:
        """This rank's batches in a whole epoch; with ``cost`` in that of the next step."""
        return self._core.batches()

    def note(self, outcome: _C.Outcome | None) -> None:
        """A step has ended; ``None``: it failed on all ranks, and its rows are skipped."""
        self._core.note([] if outcome is None else outcome.work_ms)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is of this epoch; of the one that is under way it goes on where it was."""
        self._core.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """That of the next step."""
        return self._core.epoch

    @property
    def lag(self) -> int:
        """As it was given."""
        return self._core.lag

    @property
    def shares(self) -> list[int]:
        """Rows of each rank in the first step that was not noted, if it is a whole batch.

        With ``cost`` also if it is not.
        """
        return self._core.shares()

    def state_dict(self) -> dict[str, list[float]]:
        """Where the job is: by the steps that were noted, not those that a loader fetched ahead.

        Plain numbers, the same on all ranks.
        """
        return self._core.state()

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on there: with the same shares, or from even ones with other ranks, batch or lag.

        Raises ``ValueError`` where the state is of other data, other costs, another seed or order.
        """
        self._core.load_state(state)


def _configuration() -> str:
    """Another text when the members of torch's group have changed."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    group = dist.group.WORLD
    return "" if group is None else _C._configuration_of(group)


def _tensor_of(cost: Any) -> torch.Tensor:
    if isinstance(cost, torch.Tensor):
        return cost
    try:
        return torch.tensor(cost)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"cost needs a whole number for each row (type: {type(cost).__name__}): {error}"
        ) from error


def _rows_of(data: Sized | int) -> int:
    if isinstance(data, int):
        return data
    try:
        return len(data)
    except TypeError:
        raise TypeError(
            f"a data set without a length has no numbered rows (type: {type(data).__name__}); pass the number of its "
            "rows, and take batches from the sampler's stream(data)"
        ) from None


class _Stream:
    def __init__(
        self, sampler: GlobalSampler, data: Iterable[Any], collate: Callable[[list[Any]], Any]
    ) -> None:
        if sampler._shuffle:
            raise ValueError(
                "the rows of a stream come in one order (shuffle: True); pass shuffle=False to the sampler"
            )
        self.batch_sampler = sampler
        self._data, self._collate = data, collate

    def __iter__(self) -> Iterator[Any]:
        source, place = iter(self._data), 0
        for rows in self.batch_sampler:
            own, last = set(rows), max(rows)
            kept: dict[int, Any] = {}
            while place <= last:
                try:
                    row = next(source)
                except StopIteration:
                    raise ValueError(
                        f"the stream has fewer rows than the sampler (rows of the stream: {place}); "
                        "pass their number to the sampler"
                    ) from None
                if place in own:
                    kept[place] = row
                place += 1
            yield self._collate([kept[number] for number in rows])


def global_sampler_of(loader: object) -> GlobalSampler | None:
    """That of a DataLoader. Raises ValueError where the loader fetches further ahead than it allows."""
    while isinstance(loader, LoaderAdvisor):
        loader = loader.loader
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, GlobalSampler):
        return None
    workers = getattr(loader, "num_workers", 0)
    ahead = workers * (getattr(loader, "prefetch_factor", None) or 2)
    if sampler.lag < ahead + 2:
        raise ValueError(
            f"the loader fetches further ahead than the sampler's lag (lag: {sampler.lag}, num_workers: {workers}, "
            f"batches ahead: {ahead}); pass lag={ahead + 2}"
        )
    return sampler
