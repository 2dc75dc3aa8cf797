"""What a BatchSizer's model and optimizers are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from brimful.reducer import DistributedDataParallel, _torch_ddp
from brimful.sizer._loops import Looping
from brimful.sizer._next_step import taken
from brimful.sizer._sharded import adapter, is_dtensor, local, roots_of


def modules_of(model: Any) -> list[torch.nn.Module]:
    if isinstance(model, Looping):
        raise TypeError(
            f"{type(model).__name__} makes steps itself (model: {type(model).__name__}); call its step, which "
            "repeats what runs out of memory, adds to gradients and loops over batches. predict, by_length and "
            "pair_step are for a model in one piece: give a pipeline more microbatches, sort rows by "
            "length in its loader, and compute a loss over pairs of rows in the last stage of one microbatch"
        )
    modules = [model] if isinstance(model, torch.nn.Module) else list(model)
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"model must be a module or a sequence of modules (type: {type(module)})"
            )
    return modules


def _has_dtensors(modules: Iterable[torch.nn.Module]) -> bool:
    return any(is_dtensor(p) for m in modules for p in m.parameters() if p.requires_grad)


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(taken(t.numel() * t.element_size(), device) for t in tensors if t.device == device)


def _require_reduced(outside: Sequence[torch.Tensor], wrappers: Sequence[Any]) -> None:
    """Raise where gradients would stay on this rank although there are others, and nothing says that they should."""
    ignored = {p for wrapper in wrappers for p in wrapper.parameters()}  # of which a list says so
    left = [p for p in outside if p not in ignored]
    group = wrappers[0].process_group if wrappers else None
    if not left or not dist.is_available() or not (dist.is_initialized() or wrappers):
        return
    ranks = dist.get_world_size(group)
    if ranks > 1:
        raise ValueError(
            f"gradients would stay on this rank, and the ranks' models drift apart (parameters in no wrapped module: "
            f"{len(left)}, ranks: {ranks}); wrap the module in brimful.DistributedDataParallel, or pass local=True "
            "where each rank trains a model of its own"
        )


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for item in optimizers:
        if not isinstance(item, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer or a sequence of them (type: {type(item)})"
            )
    return optimizers


class Parts:
    """The modules and tensors of a step."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.modules = modules_of(model)
        self.children = list(dict.fromkeys(child for m in self.modules for child in m.modules()))
        self.wrapped = [c for c in self.children if isinstance(c, DistributedDataParallel)]
        self.torch_ddp = [c for c in self.children if isinstance(c, _torch_ddp.TorchDDP)]
        self.sharded, self.shards = None, None
        roots = roots_of(self.modules)
        if roots or _has_dtensors(self.modules):
            if wrapped := [*self.wrapped, *self.torch_ddp]:
                raise TypeError(
                    "a step has modules whose parameters are divided over ranks, or wrapped ones: their collectives "
                    f"have no common order (wrapped: {len(wrapped)}); divide all of them by fully_shard, or give each "
                    "kind a BatchSizer of its own"
                )
            self.sharded, self.shards = adapter(roots, self.modules)
        self._sharded_parameters = self.shards.parameters if self.shards is not None else []
        self.parameters = list(dict.fromkeys(p for m in self.modules for p in m.parameters()))
        self.optimizers = optimizers_of(optimizer)
        self.outside = self._outside()

    def _outside(self) -> list[torch.Tensor]:
        """What is trained and no wrapper reduces."""
        reduced = {p for w in self.wrapped for p in w.parameters()}
        reduced.update(self._sharded_parameters)
        reduced |= {p for f in self.torch_ddp for p in _torch_ddp.trainable(f)}
        asked = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        every = dict.fromkeys([*self.parameters, *asked])
        return [p for p in every if p.requires_grad and p not in reduced]

    def require_reduced(self) -> None:
        if self.shards is not None and not self.shards.spans_all():
            raise ValueError(
                f"gradients would stay on the ranks of one tensor-parallel group (ranks: {dist.get_world_size()}); "
                "apply fully_shard over the mesh's data-parallel dimension, or pass local=True where each group trains "
                "a model of its own"
            )
        _require_reduced(self.outside, [*self.wrapped, *self.torch_ddp])

    def require_trained(self) -> None:
        if not any(p.requires_grad for p in self.parameters):
            raise ValueError(
                "the model has no parameter that needs a gradient (parameters: 0); nothing can be trained"
            )

    def lockstep(self, asked: bool | None) -> bool:
        """Raises where the ranks cannot keep it."""
        lockstep = asked
        if lockstep is None:
            synced = any(isinstance(c, torch.nn.SyncBatchNorm) for c in self.children)
            lockstep = synced or self.sharded is not None
        if not lockstep and self.sharded is not None:
            raise ValueError(
                "ranks of a sharded model gather its parameters together in every piece (lockstep: False); leave it out"
            )
        if lockstep and self.torch_ddp:
            raise ValueError(
                "ranks that use torch's DistributedDataParallel cannot keep collectives inside the model in "
                "step (lockstep: True); wrap the module in brimful.DistributedDataParallel"
            )
        return lockstep

    def buffers(self) -> list[torch.Tensor]:
        return list(dict.fromkeys(b for m in self.modules for b in m.buffers()))

    def devices(self) -> list[torch.device]:
        if self.shards is not None:
            return self.shards.devices()
        return list(dict.fromkeys(p.device for p in self.parameters if p.requires_grad))

    def gradient_bytes(self, device: torch.device) -> int:
        """Of gradients that a step allocates; those that other ranks share lie in buckets."""
        alone = [p for w in self.wrapped if w.reducer.world_size == 1 for p in w.parameters()]
        fresh = [
            *self.outside,
            *map(local, self._sharded_parameters),
            *(p for p in alone if p.requires_grad),
        ]
        return _bytes(dict.fromkeys(fresh), device)
