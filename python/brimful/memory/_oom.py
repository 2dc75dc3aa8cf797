"""What only Python knows about a program that ran out of memory.

Called within the refused allocation: it makes no tensor.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType

import torch
from torch import nn
from torch.optim import Optimizer

from brimful import _C
from brimful.memory import _labels
from brimful.sizer import BatchSizer

Program = tuple[list[tuple[str, int, bool]], list[str], bool, list[_labels.Label], bool]

_MODULES = os.path.dirname(nn.__file__) + os.sep
_MAKES = {"__init__", "reset_parameters", "_apply"}


def program() -> Program:
    """Models that are no part of another (the largest first), optimizers, whether there is a sizer, labels, and whether
    a model is being made."""
    models, optimizers, sizers = _labels.instances(nn.Module, Optimizer, BatchSizer)
    parts = {id(part) for model in models for _, part in list(_labels.named_parts(model))[1:]}
    roots = [(model, size_of(model)) for model in models if id(model) not in parts]
    roots.sort(key=lambda root: -root[1])
    return (
        [
            (_C._type_name(model), size, _C._own_attribute(model, "training") is not False)
            for model, size in roots
            if size
        ],
        sorted({_C._type_name(optimizer) for optimizer in optimizers}),
        bool(sizers),
        _labels.labels_of((model for model, _ in roots), optimizers),
        is_building(),
    )


def is_building() -> bool:
    """Whether this thread is within a module's making or moving.

    Reads no frame's variables: it would keep tensors.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in _MAKES:
            owner = frame.f_globals.get(code.co_qualname.split(".")[0])
            # By the type's own order of bases: issubclass would ask a metaclass of the program's.
            bases = type.__dict__["__mro__"].__get__(owner) if issubclass(type(owner), type) else ()
            is_module = any(base is nn.Module for base in bases)
            if is_module or code.co_filename.startswith(_MODULES):
                return True
        frame = frame.f_back
    return False


def size_of(model: nn.Module) -> int:
    """Bytes of its parameters and buffers."""
    tensors = {
        id(tensor): tensor
        for _, module in _labels.named_parts(model)
        for kind in ("_parameters", "_buffers")
        for tensor in _labels.own_tensors(module, kind)
    }
    return sum(map(_bytes_of, tensors.values()))


def _bytes_of(tensor: torch.Tensor) -> int:
    size = _C._own_bytes(tensor)
    if size is None:  # a DTensor, or of a class of the program's
        with contextlib.suppress(Exception):
            size = int(tensor.nbytes)
    return size or 0
