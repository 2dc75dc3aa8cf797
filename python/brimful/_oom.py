"""What only Python knows about a program that ran out of memory.

Called within the refused allocation: it makes no tensor.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from brimful import _labels
from brimful.sizer import BatchSizer

Program = tuple[list[tuple[str, int, bool]], list[str], bool, list[_labels.Label]]


def program() -> Program:
    """Models that are no part of another (the largest first), optimizers, whether there is a sizer, and labels."""
    models, optimizers, sizers = _labels.instances(nn.Module, Optimizer, BatchSizer)
    parts = {id(part) for model in models for part in model.children()}
    roots = [(model, size_of(model)) for model in models if id(model) not in parts]
    roots.sort(key=lambda root: -root[1])
    return (
        [(type(model).__name__, size, model.training) for model, size in roots if size],
        sorted({type(optimizer).__name__ for optimizer in optimizers}),
        bool(sizers),
        _labels.labels_of((model for model, _ in roots), optimizers),
    )


def size_of(model: nn.Module) -> int:
    """Bytes of its parameters and buffers."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values() if tensor.device.type != "meta")
