"""Whether a batch may be split: the same batch, whole and in pieces, compared in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from brimful import _C, _random
from brimful._modules import entries_of, named_modules, named_parameters, unwrapped
from brimful.sizer import BatchDim
from brimful.sizer._parts import modules_of
from brimful.sizer._same_random import SameRandomNumbers

__all__ = ["verify_split"]


def verify_split(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    pieces: int = 2,
    rtol: float | None = None,
    batch_dim: BatchDim = 0,
    size_fn: Callable[[Any], int] | None = None,
    split_fn: Callable[[Any, int, int], Any] | None = None,
) -> _C.SplitCheck:
    """Compares the batch run whole with the batch run in ``pieces``: may a ``BatchSizer`` split it?

    ``model``, ``batch``, ``loss_fn``, ``batch_dim``, ``size_fn`` and ``split_fn`` are what a ``BatchSizer`` and its
    ``step`` take, for a small batch. ``loss_fn`` gets the model without its data-parallel wrapper: other ranks take no
    part. Both runs begin with the same batch, buffers and random numbers, and these and gradients are left as they
    were.

    In the result ``equal`` says whether loss and gradients agree within ``rtol`` (default: the square root of the
    epsilon of the coarsest dtype in use, 3.5e-4 for float32). ``loss_difference`` is relative to the largest loss,
    ``gradient_difference`` is the largest difference of a parameter's gradient (``worst_parameter``), relative to its
    largest value, or to 1 % of the largest of all if that is more. ``coupled`` names the modules at which it began:
    their output differs although their input agrees, such as BatchNorm in training. ``loss_coupled`` says that no
    module is at fault and so the loss function is, such as a contrastive loss. ``random`` names modules that draw
    random numbers, such as Dropout: rows get the same numbers in both runs, so that what is random is not taken for
    coupled. Random numbers that cannot be given again (fused attention with dropout, Python's and numpy's) make
    ``equal`` false, and nothing is said of the loss then. Places of rows (``torch.randperm(len(x))``) are other places
    in a piece: what draws them counts as coupled.

    Raises ``ValueError`` if the batch has fewer rows than ``pieces``, and what ``loss_fn`` raises. Gradients are
    computed as ``torch.autograd.grad`` does: checkpoints need ``use_reentrant=False``. Modules that are compiled run
    uncompiled. Holds copies of the batch, and of what goes into and comes out of every module. Waits for the device.
    From one thread.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable (type: {type(loss_fn)})")
    several = [model] if isinstance(model, torch.nn.Module) else list(model)
    models = [unwrapped(m) for m in several]
    modules_of(models)
    plain = models[0] if isinstance(model, torch.nn.Module) else models
    parameters = named_parameters(models)
    log = _C._CallLog()
    hooks = []
    try:
        for name, module in named_modules(models):
            hooks += [
                module.register_forward_pre_hook(_entering(log, name), with_kwargs=True),
                module.register_forward_hook(_leaving(log, name)),
            ]
        return _C._verify_split(
            batch=batch,
            loss_fn=_telling_of_other_numbers(log, lambda piece: loss_fn(plain, piece)),
            around=SameRandomNumbers(log),
            parameters=parameters,
            entries=entries_of(models),
            device=next((p.device for _, p in parameters), torch.device("cpu")),
            keepers=[_random.KEEPER],
            splitter=_C.Splitter(batch_dim=batch_dim, size_fn=size_fn, split_fn=split_fn),
            pieces=pieces,
            rtol=rtol,
            log=log,
        )
    finally:
        for hook in hooks:
            hook.remove()


def _telling_of_other_numbers(
    log: _C._CallLog, loss_of: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Random numbers of Python and numpy cannot be given again by rows."""

    def loss(piece: Any) -> Any:
        before = _random.marks()
        result = loss_of(piece)
        if _random.marks() != before:
            log.drew(False)
        return result

    return loss


def _entering(log: _C._CallLog, name: str) -> Callable[..., None]:
    return lambda module, args, kwargs: log.enter(name, (args, kwargs))


def _leaving(log: _C._CallLog, name: str) -> Callable[..., None]:
    return lambda module, args, output: log.leave(name, output)
