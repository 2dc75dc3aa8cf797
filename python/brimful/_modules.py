"""Modules by the names that their model gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from brimful import _C
from brimful.reducer import DistributedDataParallel


def closed_over(function: Any) -> list[object]:
    """What the function has in its closure, as far as that is set."""
    held: list[object] = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):
            held.append(cell.cell_contents)
    return held


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """What a data-parallel wrapper wraps."""
    wrappers = DistributedDataParallel, torch.nn.parallel.DistributedDataParallel
    return cast(torch.nn.Module, model.module) if isinstance(model, wrappers) else model


def _named(prefix: str, name: str) -> str:
    name = name.replace("_orig_mod.", "").removesuffix("_orig_mod")  # torch.compile's
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _prefixed(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for index, model in enumerate(models):
        yield "" if len(models) == 1 else str(index), unwrapped(model)


def named_modules(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """As ``named_modules`` of the one model, without wrappers; names of several begin with the model's place."""
    found: dict[torch.nn.Module, str] = {}
    for prefix, model in _prefixed(models):
        for name, module in model.named_modules():
            found.setdefault(module, _named(prefix, name))
    return [(name, module) for module, name in found.items()]


def named_parameters(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    found: dict[torch.Tensor, str] = {}
    for prefix, model in _prefixed(models):
        for name, parameter in model.named_parameters():
            found.setdefault(parameter, _named(prefix, name))
    return [(name, parameter) for parameter, name in found.items()]


def batch_norms(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """BatchNorm, and all else that may keep running statistics."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return [
        (name, module)
        for name, module in named_modules(models)
        if isinstance(module, kind) or module._buffers
    ]


def entries_of(models: Iterable[torch.nn.Module]) -> _C._ModuleEntries:
    """What names in the modules, and in those inside them, stand for: a forward may change that."""
    every = list(dict.fromkeys(child for model in models for child in model.modules()))
    return _C._ModuleEntries([m._buffers for m in every], [m._parameters for m in every])
