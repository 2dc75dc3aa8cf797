"""What is timed: the models, the bare module, torch's DDP with each of its flags, ours."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel

OURS = "benchmarks.reducer.cases:make_brimful"
OURS_ORDERED = "benchmarks.reducer.cases:make_brimful_ordered"
OURS_BF16 = "benchmarks.reducer.cases:make_brimful_bf16"
BARE = "bare"
BARE_AGAIN = "bare_again"
OURS_CASE = "brimful"
OURS_AGAIN = "brimful_again"
TORCH = "torch:"
# Torch's default without compression: timed beside a bf16 wire, and the reference of its gradients.
FP32_WIRE = "fp32_wire:torch"

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
class TorchCase:
    """Arguments of torch's class, and a communication hook: "", python, builtin or bf16."""

    flags: dict[str, Any]
    hook: str = ""


# The same all-reduce through a hook. They come after torch's own copy, so they can only tie.
TORCH_HOOKS = {
    "view+python_hook": TorchCase({"gradient_as_bucket_view": True}, "python"),
    "view+builtin_hook": TorchCase({"gradient_as_bucket_view": True}, "builtin"),
}


@dataclass(frozen=True)
class Model:
    """A chain of linear layers. `width` inputs and outputs each, `batch` rows a rank."""

    layers: int
    width: int
    batch: int
    bias: bool

    @property
    def text(self) -> str:
        """Returns what stands in a figure's conditions."""
        return f"{self.layers} x Linear({self.width}, bias={self.bias})"

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


def make_brimful(module: nn.Module, **options: Any) -> nn.Module:
    """Wraps a module in brimful's class; at W = 1 too this is the whole path."""
    import brimful
    from brimful.reducer._whole_path import whole_path

    with whole_path():
        wrapped: nn.Module = brimful.DistributedDataParallel(module, **options)
    return wrapped


def make_brimful_ordered(module: nn.Module) -> nn.Module:
    """Wraps a module in brimful's class without tuned bucket sizes: all cases get the same plan."""
    return make_brimful(module, plan="ordered")


def make_brimful_bf16(module: nn.Module) -> nn.Module:
    """Wraps a module with a bf16 wire and error feedback."""
    return make_brimful(module, wire_dtype=torch.bfloat16, error_feedback=True)


def fixed_plan(bucket_mb: float) -> dict[str, Any]:
    """Returns our arguments for buckets of a given size that no planner changes."""
    return {"bucket_cap_mb": bucket_mb, "plan": "ordered"}


def settle_steps(module: nn.Module) -> int:
    """Returns in how many steps a module tries bucket sizes, at most."""
    return 100 if hasattr(module, "plan") else 0


def wire_bytes(module: nn.Module) -> int | str:
    """Returns the bytes that our last step gave to collectives, or why they are unknown."""
    telemetry = getattr(module, "telemetry", None)
    if telemetry is None:
        return "ours has no telemetry()"
    found = telemetry()
    return int(found["bytes"]) if "bytes" in found else "ours counts no bytes in telemetry()"


def resolve(factory: str) -> Callable[..., nn.Module]:
    """Returns the function named `module:function`."""
    module, _, function = factory.partition(":")
    resolved: Callable[..., nn.Module] = getattr(importlib.import_module(module), function)
    return resolved


def torch_flags() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns the sets of flags that this torch takes, and the flags that it lacks."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    absent = {flag for flags in TORCH_FLAGS.values() for flag in flags if flag not in known}
    present = {name: flags for name, flags in TORCH_FLAGS.items() if not absent & set(flags)}
    return present, sorted(absent)


def torch_cases(
    hooks: bool = False, bf16_wire: bool = False
) -> tuple[dict[str, TorchCase], list[str]]:
    """Returns torch's peers, and the flags that this torch lacks.

    `hooks` adds those of TORCH_HOOKS; `bf16_wire` gives all bf16_compress_hook and adds FP32_WIRE.
    """
    flags, absent = torch_flags()
    hook = "bf16" if bf16_wire else ""
    found = {name: TorchCase(arguments, hook) for name, arguments in flags.items()}
    if hooks:
        found.update(TORCH_HOOKS)
    if bf16_wire:
        found[FP32_WIRE] = TorchCase({})
    return found, absent


def make_torch(module: nn.Module, case: TorchCase) -> nn.Module:
    """Wraps a module in torch's class."""
    wrapped = DistributedDataParallel(module, **case.flags)
    if case.hook == "builtin":
        wrapped._register_builtin_comm_hook(  # type: ignore[no-untyped-call]
            dist.BuiltinCommHookType.ALLREDUCE  # type: ignore[attr-defined]
        )
    elif case.hook:
        hooks = {"python": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook}
        wrapped.register_comm_hook(None, hooks[case.hook])
    return wrapped
