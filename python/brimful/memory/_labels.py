"""Which tensors are parameters, buffers, gradients and optimizer state."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brimful import _C

Label = tuple[torch.Tensor, str]  # and its category


def labels_of(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[Label]:
    """Each tensor that they hold with its category; no tensor's data are touched, and no method of theirs is called."""
    labels: list[Label] = []
    parameters: dict[int, torch.Tensor] = {}
    for model in models:
        for _, module in named_parts(model):
            parameters.update((id(p), p) for p in own_tensors(module, "_parameters"))
            labels += [(buffer, "buffers") for buffer in own_tensors(module, "_buffers")]
    for optimizer in optimizers:
        for group in _C._own_items(_C._own_attribute(optimizer, "param_groups")):
            held = dict.get(group, "params") if issubclass(type(group), dict) else None
            parameters.update((id(p), p) for p in _tensors(held))
        state = _C._own_attribute(optimizer, "state")
        labels += [(t, "optimizer_state") for t in _tensors(state)]
    gradients = [_C._own_gradient(p) for p in parameters.values()]
    return [
        *((p, "parameters") for p in parameters.values()),
        *((gradient, "gradients") for gradient in gradients if gradient is not None),
        *labels,
    ]


def named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, whatever a class of the program's makes of that; itself comes first."""
    seen: set[int] = set()
    ahead = [("", model)]
    while ahead:
        name, module = ahead.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        inner = [
            (f"{name}.{key}" if name else key, part)
            for key, part in _named(module, "_modules")
            if issubclass(type(part), nn.Module)
        ]
        ahead += reversed(inner)


def own_tensors(module: nn.Module, kind: str) -> list[torch.Tensor]:
    """Its "_parameters" or "_buffers", without those of its parts."""
    return [tensor for _, tensor in _named(module, kind) if issubclass(type(tensor), torch.Tensor)]


def _named(module: nn.Module, kind: str) -> list[tuple[str, Any]]:
    held = _C._own_attribute(module, kind)
    if issubclass(type(held), dict):
        return [(str.__str__(k), v) for k, v in dict.items(held) if issubclass(type(k), str)]
    if isinstance(module, torch.jit.ScriptModule):  # keeps them in C++; its classes are torch's
        with contextlib.suppress(Exception):
            return list(getattr(module, kind).items())
    return []


def found() -> tuple[list[nn.Module], list[Optimizer]]:
    """All models and optimizers that live in this process."""
    models, optimizers = instances(nn.Module, Optimizer)
    return models, optimizers


def instances(*bases: type) -> list[list[Any]]:
    """What lives of each class: one pass over what the garbage collector knows."""
    lists: list[list[Any]] = [[] for _ in bases]
    list_of: dict[int, list[Any] | None] = {}  # by id: a class may have a __hash__ of the program's
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: it would ask proxies for their __class__
        if id(kind) not in list_of:
            list_of[id(kind)] = next(
                (x for x, base in zip(lists, bases, strict=True) if issubclass(kind, base)), None
            )
        if (kept := list_of[id(kind)]) is not None:
            kept.append(thing)
    return lists


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """In dicts, lists and tuples, however deep, each of them once."""
    ahead, seen = [value], set()
    while ahead:
        value = ahead.pop()
        if issubclass(type(value), torch.Tensor):
            yield value
        elif issubclass(type(value), dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            ahead += reversed(_C._own_items(value))
