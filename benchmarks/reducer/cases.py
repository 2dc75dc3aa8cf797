"""What is timed: the models, the bare module, torch's DDP with each of its flags, ours."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel

OURS = "benchmarks.reducer.cases:make_brimful"
BARE = "bare"
BARE_AGAIN = "bare_again"
OURS_CASE = "brimful"
OURS_AGAIN = "brimful_again"
TORCH = "torch:"

# Each flag of torch's DDP alone, and those that a user would combine for speed. A flag that the
# torch at hand lacks is left out and named in the figure's conditions.
TORCH_FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "view+batched": {"gradient_as_bucket_view": True, "batched_grad_copy": True},
    "static": {"static_graph": True},
    "static+view": {"static_graph": True, "gradient_as_bucket_view": True},
    "static+batched": {"static_graph": True, "batched_grad_copy": True},
    "static+view+batched": {
        "static_graph": True,
        "gradient_as_bucket_view": True,
        "batched_grad_copy": True,
    },
    "lazy": {"lazy_bucket_allocation": True},
    "one_bucket": {"bucket_cap_mb": 1000},
    "one_bucket+batched": {"bucket_cap_mb": 1000, "batched_grad_copy": True},
    "find_unused": {"find_unused_parameters": True},
    "find_unused+skip": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}


@dataclass(frozen=True)
class Model:
    """A chain of linear layers. `width` inputs and outputs each, `batch` rows a rank."""

    layers: int
    width: int
    batch: int
    bias: bool

    def make(self) -> nn.Module:
        """Returns the module, the same on every rank.

        The weights keep the gradient's size through the depth: torch's default would shrink it to
        denormals in 400 layers, which costs time and leaves nothing to compare.
        """
        torch.manual_seed(0)
        layers = [nn.Linear(self.width, self.width, bias=self.bias) for _ in range(self.layers)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=self.width**-0.5)
        return nn.Sequential(*layers)

    def data(self, rank: int) -> torch.Tensor:
        """Returns the rank's own input."""
        torch.manual_seed(1 + rank)
        return torch.randn(self.batch, self.width)


def make_brimful(module: nn.Module) -> nn.Module:
    """Wraps a module in brimful's class; at W = 1 too this is the whole path."""
    import brimful

    wrapped: nn.Module = brimful.DistributedDataParallel(module)
    return wrapped


def resolve(factory: str) -> Callable[[nn.Module], nn.Module]:
    """Returns the function named `module:function`."""
    module, _, function = factory.partition(":")
    resolved: Callable[[nn.Module], nn.Module] = getattr(importlib.import_module(module), function)
    return resolved


def torch_flags() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns the sets of flags that this torch takes, and the flags that it lacks."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    absent = {flag for flags in TORCH_FLAGS.values() for flag in flags if flag not in known}
    present = {name: flags for name, flags in TORCH_FLAGS.items() if not absent & set(flags)}
    return present, sorted(absent)


def make_torch(module: nn.Module, flags: dict[str, Any]) -> nn.Module:
    """Wraps a module in torch's class."""
    return DistributedDataParallel(module, **flags)
