"""Failures between steps, and the process's end: what this rank owes the others leaves before it goes elsewhere."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from brimful import _C, _log

if TYPE_CHECKING:
    from brimful.reducer import DistributedDataParallel

_EXIT_PATIENCE_MS = 2000
_logger = logging.getLogger("brimful")
_live: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def register(model: DistributedDataParallel) -> None:
    """From now on `model` informs the others of an error that ends the process, or that leaves a step unfinished."""
    _live.add(model)
    _install_hooks()


def is_out_of_memory(error: BaseException) -> bool:
    """As the core decides: by its type, then by its message and what is free; `RankOutOfMemory` too."""
    return _C._is_out_of_memory(error)


def mark_reported(error: BaseException) -> None:
    """The other ranks know this error, and it is not announced again."""
    with suppress(Exception):  # slots, or a class that refuses
        error._brimful_reported = True  # type: ignore[attr-defined]


def _was_reported(error: BaseException) -> bool:
    with suppress(Exception):
        return isinstance(error, _C.RankFailed) or getattr(error, "_brimful_reported", False)
    return False


def text_of(error: BaseException) -> str:
    return f"{_C._type_name(error)}: {_log.text_of(error)}"


def _announce(error: BaseException | None) -> None:
    """The process ends: whatever it owes is sent now, with the error's text."""
    if error is not None and _was_reported(error):
        return
    for model in list(_live):
        reducer = model._reducer
        if reducer is None:
            continue
        try:
            if error is None and not reducer.owes:
                if model.in_loop():  # they find the group broken, and read this text
                    reducer.publish_failure(False, "its process ended between two steps")
                continue
            memory = error is not None and is_out_of_memory(error)
            text = (
                text_of(error) if error is not None else "its process ended in the middle of a step"
            )
            if model.buckets_expected():
                reducer.announce_failure(memory, text, _EXIT_PATIENCE_MS)
            else:  # the others are elsewhere, and find the group broken when this process is gone
                reducer.publish_failure(memory, text)
        except Exception as unheard:
            print(
                f"brimful: could not announce this rank's failure: {_log.text_of(unheard)}",
                file=sys.stderr,
            )


def announce_owed(error: BaseException) -> None:
    """Send what is owed now: the others may wait for it while this rank goes on elsewhere."""
    for model in list(_live):
        if model._owes():
            try:
                model.reducer.announce_failure(is_out_of_memory(error), text_of(error), 0)
            except Exception as unheard:
                _logger.warning("could not announce this rank's failure: %s", _log.text_of(unheard))


def _end() -> None:
    """Before the interpreter ends: send what is owed, then join the process groups' threads.

    These may hold tensors of Python, and a thread that needs an interpreter that is gone ends the process.
    """
    _announce(None)
    _C._release_groups()
    for model in list(_live):
        model.process_group = None


_hooks_installed = False


def _install_hooks() -> None:
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object] = (
        sys.excepthook
    )

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        sys.stderr.flush()
        _announce(error)

    sys.excepthook = excepthook
    atexit.register(_end)
    register_module_parameter_registration_hook(_suspect)
    register_module_module_registration_hook(_suspect)
    register_optimizer_step_pre_hook(lambda optimizer, *_: _settle_before(optimizer))


def _suspect(module: torch.nn.Module, *_: object) -> None:
    for model in list(_live):
        if model._reducer is not None and id(module) in model._inside:
            model._suspect = True


def _settle_before(optimizer: torch.optim.Optimizer) -> None:
    """Models that owe the others a step and share a parameter with `optimizer` inform them now."""
    owing = [model for model in list(_live) if model._owes()]
    if not owing:
        return
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    for model in owing:
        if not stepped.isdisjoint(model.parameters()):
            model._settle()
