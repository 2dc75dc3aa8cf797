"""Informs the live table of what only Python knows: frames, optimizer steps, names of modules."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from brimful import _C, _log
from brimful.memory import _labels

_removers: list[Callable[[], None]] = []
_give_way: Callable[[], None] | None = None
_recording_tracks = False  # a recording began the tracking that it needs


def start(
    modules: nn.Module | None,
    report: str | None,
    *,
    every_module: bool = False,
    give_way: Callable[[], None] | None = None,
) -> None:
    """Starts tracking with all hooks in place, or raises and leaves none.

    The next start ends one that has ``give_way``, and calls that before.
    """
    global _give_way
    if modules is not None and not isinstance(modules, nn.Module):
        raise TypeError(f"modules must be a torch.nn.Module (type: {type(modules).__name__})")
    _make_way()
    _C.memory_start_tracking()
    try:
        _give_way = give_way
        _C._set_oom_report_path(report or os.environ.get("BRIMFUL_OOM_REPORT"))
        _C._read_frames(True)
        _removers.extend(
            (
                torch_optimizer.register_optimizer_step_pre_hook(
                    _C._memory_before_optimizer
                ).remove,
                torch_optimizer.register_optimizer_step_post_hook(
                    _C._memory_after_optimizer
                ).remove,
            )
        )
        if modules is not None:
            _name_modules(modules)
        if every_module:
            _name_every_module()
    except BaseException:
        stop()
        raise


def _make_way() -> None:
    if _give_way is not None:
        _give_way()
        stop()


def stop() -> None:
    """Undoes start."""
    global _give_way
    _give_way = None
    _C.memory_stop_tracking()
    _C._write_pending_oom_report()
    while _removers:
        _removers.pop()()


def add_oom_note(error: BaseException) -> None:
    """CUDA's errors get the report as a note: torch has made their text before anybody else is informed."""
    if not isinstance(error, torch.OutOfMemoryError):
        return
    with _log.unheard("the note of the out-of-memory error"):
        last = _C.memory_last_oom()
        if last is not None and _log.text_of(error).startswith("CUDA out of memory"):
            error.add_note(last.short.strip())


def start_recording(ring_bytes: int, modules: nn.Module | None) -> None:
    """Starts a recording, and tracking where it is off."""
    global _recording_tracks
    if _C.memory_recording() or modules is not None:
        _make_way()
    if _C.memory_recording():
        _C.memory_start_recording(ring_bytes)  # raises
    tracks = not _C.memory_tracking()
    if tracks:
        start(modules, None)
    elif modules is not None:
        raise ValueError("memory is tracked already: give the modules to track() (modules: given)")
    try:
        _C.memory_start_recording(ring_bytes)
    except BaseException:
        if tracks:
            stop()
        raise
    _recording_tracks = tracks


def stop_recording(labels: list[_labels.Label]) -> _C.MemoryRecording:
    """Undoes start_recording."""
    rank = (dist.get_rank(), dist.get_world_size()) if _has_group() else (None, None)
    recording = _C.memory_stop_recording(labels, *rank)
    if _recording_tracks:
        stop()
    return recording


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _name_modules(root: nn.Module) -> None:
    for name, module in root.named_modules():
        known = _C._memory_name(_C._text(name) or _C._type_name(root))
        enter = functools.partial(_enter_module, known)
        _removers.append(module.register_forward_pre_hook(enter).remove)
        _removers.append(module.register_forward_hook(_leave_module, always_call=True).remove)


def _name_every_module() -> None:
    """Of each model that is called, from its first call on; the models have no hook and stay as they are."""
    names: dict[int, tuple[weakref.ref[nn.Module], int]] = {}

    def name(root: nn.Module) -> None:
        for path, module in _labels.named_parts(root):
            key = id(module)
            if key not in names:
                number = _C._memory_name(_C._text(path) or _C._type_name(module))
                forget = functools.partial(names.pop, key)  # with the reference as the default
                names[key] = weakref.ref(module, forget), number

    def enter(module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(module) not in names:
            name(module)
        _C._memory_enter_module(names[id(module)][1])

    def leave(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            _C._memory_leave_module()

    _removers.append(torch_module.register_module_forward_pre_hook(enter).remove)
    _removers.append(torch_module.register_module_forward_hook(leave, always_call=True).remove)


# Functions of Python: a model with hooks has to stay picklable.
def _enter_module(name: int, *_: Any) -> None:
    _C._memory_enter_module(name)


def _leave_module(*_: Any) -> None:
    _C._memory_leave_module()
