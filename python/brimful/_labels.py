"""Which tensors are parameters, buffers, gradients and optimizer state."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Label = tuple[torch.Tensor, str]  # and its category


def labels_of(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[Label]:
    """Each tensor that they hold with its category; no tensor's data are touched."""
    labels: list[Label] = []
    parameters: dict[int, torch.Tensor] = {}
    for model in models:
        parameters.update((id(p), p) for p in model.parameters())
        labels += [(buffer, "buffers") for buffer in model.buffers()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters.update((id(p), p) for p in group["params"])
        labels += [(t, "optimizer_state") for t in _tensors(list(optimizer.state.values()))]
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    return [
        *((p, "parameters") for p in parameters.values()),
        *((gradient, "gradients") for gradient in gradients),
        *labels,
    ]


def found() -> tuple[list[nn.Module], list[Optimizer]]:
    """All models and optimizers that live in this process."""
    models, optimizers = instances(nn.Module, Optimizer)
    return models, optimizers


def instances(*bases: type) -> list[list[Any]]:
    """What lives of each class: one pass over what the garbage collector knows."""
    lists: list[list[Any]] = [[] for _ in bases]
    list_of: dict[type, list[Any] | None] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: it would ask proxies for their __class__
        if kind not in list_of:
            list_of[kind] = next(
                (x for x, base in zip(lists, bases, strict=True) if issubclass(kind, base)), None
            )
        if (kept := list_of[kind]) is not None:
            kept.append(thing)
    return lists


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
