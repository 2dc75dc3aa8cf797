"""Inference over a batch of any size; the work is done in C++."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from brimful import _C, _random
from brimful._modules import closed_over, entries_of
from brimful.sizer import BatchDim

__all__ = ["map_batches"]


def _identity(fn: Any) -> int:
    """Of the same function in another call: its code, and the modules that it uses. Never 0."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    function = getattr(fn, "__func__", fn)
    modules = [id(value) for value in closed_over(function) if isinstance(value, torch.nn.Module)]
    code = getattr(function, "__code__", function)
    return (hash((id(code), id(owner), *modules)) & sys.maxsize) | 1


def _modules_of(fn: Any) -> list[torch.nn.Module]:
    """Those that it is, is bound to, holds or names, and attributes of such objects."""
    used: list[Any] = []
    while isinstance(fn, functools.partial):
        used += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    function = getattr(fn, "__func__", fn)
    if isinstance(function, types.FunctionType):
        used += closed_over(function)
        used += [function.__globals__.get(name) for name in function.__code__.co_names]
    used += [owner, fn]
    held = [value for holder in used for value in _attributes_of(holder)]
    return [value for value in used + held if issubclass(type(value), torch.nn.Module)]


def _attributes_of(holder: Any) -> list[Any]:
    if issubclass(type(holder), (type, types.ModuleType, torch.nn.Module)):
        return []
    with suppress(Exception):  # a proxy that stands for nothing yet
        return list(vars(holder).values())
    return []


def map_batches(
    fn: Callable[[Any], Any],
    batch: Any,
    *,
    pieces: int = 1,
    max_retries: int = 8,
    batch_dim: BatchDim = 0,
    size_fn: Callable[[Any], int] | None = None,
    split_fn: Callable[[Any, int, int], Any] | None = None,
) -> Any:
    """``fn(batch)`` without gradients, in pieces where memory runs out.

    ``batch`` is what ``BatchSizer.step`` takes; ``batch_dim``, or ``size_fn`` and ``split_fn``, say how it is cut, as
    they do for a ``BatchSizer``. ``fn`` returns a tensor, or a tuple, list, dict or namedtuple of tensors (``None`` may
    be among them), with one row in dimension 0 for every row that it got. The result has the same structure: it is
    allocated once, when the first piece shows shape and dtype, and each piece is written into its rows. If the first
    piece is the whole batch, ``fn``'s own result is returned.

    Begins with ``pieces`` pieces, or as a call of the same function with batches of this form has ended. When memory
    runs out, the rows that are missing go on in pieces of half the size (or less, so that with the last retry a piece
    has one row), and a size that fitted is kept, in later calls in proportion where rows have more elements. It grows
    again, within a call too, to what is known to fit; what failed is tried again when there is more room, or after 16
    pieces, then after twice as many each time. ``fn`` may be called again for the same rows: from the same
    random numbers (torch's, Python's and numpy's), so that dropout gives what it gives in the same pieces without a
    retry, and from the same buffers of the modules that it is, is bound to, closes over or names, so that BatchNorm in
    training counts each row once.

    Raises ``BatchTooLarge`` (a ``torch.OutOfMemoryError``) with the sizes tried, bytes by category (the model's too if
    ``fn`` is a module) and advice, if a piece of one row does not fit, or memory ran out more than ``max_retries``
    times for the same rows; ``ValueError`` if the batch is empty, or if results have another
    number of rows or differ between pieces in structure, shape, dtype or device; ``TypeError`` if ``fn`` returns
    anything else; and what ``fn`` raises. Waits for the device only where memory ran out. From any thread.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable (type: {type(fn)})")
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    rank, world_size = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    modules = _modules_of(fn)
    model = None
    if isinstance(fn, torch.nn.Module):
        model = list(fn.parameters()), list(fn.buffers())
    return _C._map_batches(
        fn,
        batch,
        function=_identity(fn),
        splitter=_C.Splitter(batch_dim=batch_dim, size_fn=size_fn, split_fn=split_fn),
        pieces=pieces,
        max_retries=max_retries,
        device=device,
        keepers=[_random.KEEPER],
        rank=rank,
        world_size=world_size,
        model=model,
        names=entries_of(modules) if modules else None,
    )
