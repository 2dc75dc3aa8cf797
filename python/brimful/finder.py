"""A batch size that fits, found by trying; the ranks agree on each try in C++.

The retry driver of steps is not used here: it cuts known rows into smaller pieces, and here each try is other work,
whose size is the caller's (``reduce_batch_size_fn``) or accelerate's rule.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from brimful import _C, _log, memory
from brimful._process_end import announce_owed, is_out_of_memory, text_of
from brimful.checkpoint import _group

__all__ = ["find_executable_batch_size"]

_TO_DO = "find a batch size that fits"
# What accelerate's decorator takes for a shortage beyond what brimful knows for one.
_ACCELERATES = (
    " out of memory.",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "PT_DEVMEM Allocation failed",
)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Takes the place of accelerate's decorator: calls ``function(batch_size, ...)`` again with a smaller one while
    memory runs out.

    The next size is ``int(0.9 * batch_size)``, or what ``reduce_batch_size_fn()`` returns; a later call begins with the
    size that the last one ended with. Before each try the frames of the last one are gone, garbage is collected and
    cached memory is given back. Raises ``TypeError`` if the caller passes the batch size too, ``RuntimeError`` when the
    size has reached zero, and what else ``function`` raises. Arguments are passed as they are: what a try has changed
    in them, such as a tensor in place, stays changed.

    Where ``torch.distributed`` is initialised all ranks call the function together, and meet through the store of the
    default group after each try, which must end on all of them within the group's timeout: if memory ran out on one,
    all go on with a smaller size. If ``function`` raises another error on a rank, the others raise ``RankFailed`` with
    its text. Inside ``function`` a rank that runs out in forward or backward of a ``brimful.DistributedDataParallel``
    informs the others, which wait for its gradients; where it runs out between other collectives, they wait for their
    timeout.

    This changes the batch, and so the training. ``BatchSizer`` keeps the batch and changes only its split.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    wrapped = function
    batch_size = starting_batch_size

    def find(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size

        def attempt() -> Any:
            _check_call(wrapped, args)
            if batch_size <= 0:
                raise RuntimeError("No executable batch size found, reached zero.")
            return wrapped(batch_size, *args, **kwargs)

        while True:
            _clean()
            ended = _try(attempt)
            if not _share(ended):
                return ended
            del ended  # a result that fits here and not elsewhere
            batch_size = (
                int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            )

    functools.update_wrapper(find, wrapped)
    del find.__wrapped__  # type: ignore[attr-defined]  # whose signature has a batch size
    return find


class _RanOut(str):
    """The error's text, in the place of a result."""


def ran_out_on_any_rank(attempt: Callable[[], Any]) -> bool:
    """Whether memory ran out in it on any of the ranks, which call it together."""
    return _share(_try(attempt))


def _try(attempt: Callable[[], Any]) -> Any:
    """Its result, or what it said when memory ran out; the error and its frames are gone then."""
    try:
        return attempt()
    except BaseException as error:
        announce_owed(error)
        if not _ran_out(error):
            _C._share_attempt(_group(None), _TO_DO, False, True, text_of(error))
            raise
        return _RanOut(text_of(error))


def _share(ended: Any) -> bool:
    out = isinstance(ended, _RanOut)
    return _C._share_attempt(_group(None), _TO_DO, out, False, str(ended) if out else "")


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters]
    if len(args) + 1 <= len(names) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    name = getattr(function, "__name__", repr(function))
    given = ", ".join(f"{n}={value}" for n, value in zip(names[1:], args[1:], strict=False))
    raise TypeError(
        f"Batch size was passed into `{name}` as the first argument when called. "
        f"Remove this as the decorator already does so: `{name}({given})`"
    )


def _ran_out(error: BaseException) -> bool:
    if is_out_of_memory(error):  # the one of another rank too
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, _C.RankFailed):
        return False
    message = _log.text_of(error)
    return "NCCL" not in message and any(text in message for text in _ACCELERATES)


def _clean() -> None:
    gc.collect()
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    _C._empty_engine_queue(f"cuda:{torch.cuda.current_device()}" if on_cuda else "cpu")
    memory.release_cached("cpu")
    if on_cuda:
        memory.release_cached("cuda")
