"""A loader that ends on all ranks together, with ``NO_DATA`` where a rank's own has ended before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from brimful.sizer import NO_DATA


def until_all_end(loader: Any, device: torch.device) -> Any:
    """The loader itself if all ranks have one of the same length. A collective of the default group."""
    lengths: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, _length(loader))
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return _UntilAllEnd(loader, device)
    if min(known) == max(known):
        return loader
    return _AsLongAsTheLongest(loader, max(known))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class _InPlaceOf:
    """What is asked of it, or set, is the loader's: its sampler, its dataset, its workers."""

    def __init__(self, loader: Any, **own: Any) -> None:
        vars(self).update(_loader=loader, **own)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


class _AsLongAsTheLongest(_InPlaceOf):
    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader, _most=length)

    def __len__(self) -> int:
        return int(self._most)

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._loader)
        for _ in range(self._most):
            yield next(source, NO_DATA)


class _UntilAllEnd(_InPlaceOf):
    """The ranks meet for each batch, since none knows how many there are."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        super().__init__(loader, _flag_device=device)

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._loader)
        while True:
            batch = next(source, NO_DATA)
            any_rank = torch.tensor(int(batch is not NO_DATA), device=self._flag_device)
            dist.all_reduce(any_rank, dist.ReduceOp.MAX)
            if not any_rank.item():
                return
            yield batch
