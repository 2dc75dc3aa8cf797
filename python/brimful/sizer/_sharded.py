"""Models that FSDP2 (`fully_shard`) has sharded, as a part of a BatchSizer's step.

The core knows the collectives; this answers what only FSDP's own objects can. What is used of its internals is that of
torch 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from brimful import _C
from brimful.reducer._side_groups import side_group

#: Of a parameter group, which a piece may leave as the program's own switches had them in its midst.
_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
_DIVISION = ("gradient_divide_factor", "force_sum_reduction_for_comms")


def is_dtensor(parameter: torch.Tensor) -> bool:
    return type(parameter.data).__name__ == "DTensor"


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard, which needs a gradient if the tensor does; the tensor itself if it has none."""
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard.detach().requires_grad_(tensor.requires_grad)  # type: ignore[no-any-return]


def roots_of(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Modules that `fully_shard` was applied to and that lie in no other one, one for each of its calls."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, Any] = {}

    def visit(module: torch.nn.Module) -> None:
        if isinstance(module, FSDPModule):
            found.setdefault(id(module._get_fsdp_state()), module)
            return
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(found.values())


def _groups_of(root: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    states = {
        id(state): state
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for state in [module._get_fsdp_state()]
    }
    return [group for state in states.values() for group in state._fsdp_param_groups]


def _forwards_of(root: Any) -> list[Any] | None:
    """Parameter groups in the order of a forward that no backward has followed; None before the first one."""
    return getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", None)


class Shards:
    """What `fully_shard` has made of a model."""

    def __init__(self, roots: Sequence[Any]) -> None:
        if not hasattr(roots[0], "reset_iter_state"):
            raise TypeError(
                "a model of fully_shard comes back from a failed piece by FSDPModule.reset_iter_state, which is new in "
                f"torch 2.15 (torch: {torch.__version__}); install it, or wrap the module in "
                "brimful.DistributedDataParallel instead"
            )
        self._roots = list(roots)
        self._groups = [group for root in roots for group in _groups_of(root)]
        self.parameters = list(
            dict.fromkeys(
                p.sharded_param
                for group in self._groups
                for p in group.fsdp_params
                if p.sharded_param.requires_grad
            )
        )
        self._before: list[tuple[Any, str, Any]] = []
        self._switches: list[tuple[Any, str, Any]] = []
        self._require_known()

    def _require_known(self) -> None:
        for group in self._groups:
            if any(p.is_dtensor for p in group.fsdp_params):
                raise TypeError(
                    "fully_shard over tensor parallelism has collectives whose sizes follow the batch, which a rank "
                    "that fails cannot issue for the others; shard the model by fully_shard alone"
                )
            if group.gradient_divide_factor not in (None, 1.0):
                raise ValueError(
                    "a step divides gradients by the weight of all ranks' rows (set_gradient_divide_factor: "
                    f"{group.gradient_divide_factor}); leave it out, and weigh the loss: return (mean loss, weight)"
                )

    def devices(self) -> list[torch.device]:
        """Where pieces run, which is not where an offload policy keeps the shards."""
        return list(dict.fromkeys(torch.device(group.device) for group in self._groups))

    def require_synced(self) -> None:
        if not all(g.reduce_grads and g.all_reduce_grads for g in self._groups):
            raise ValueError(
                "a step reduces the gradients of each of its pieces (set_requires_gradient_sync: False); leave that "
                "out, and pass accumulate=True to add to the gradients of earlier steps"
            )

    def mesh(self) -> Any:
        parameters = [p.sharded_param for group in self._groups for p in group.fsdp_params]
        meshes = list(dict.fromkeys(p.device_mesh for p in parameters))
        if len({tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}) != 1:
            raise TypeError(
                f"modules of one step are sharded over the same ranks (meshes: {len(meshes)}); give each mesh a "
                "BatchSizer of its own"
            )
        return meshes[0]

    def in_attempt(self, on: bool) -> None:
        for owner, name, value in self._before:
            setattr(owner, name, value)
        self._before = []
        if not on:
            return
        for root in (
            self._roots
        ):  # an evaluation leaves its order, by which the next backward would prefetch
            if _forwards_of(root):
                root.reset_iter_state()
        self._switches = [(g, n, getattr(g, n)) for g in self._groups for n in _SWITCHES]
        self._before = [(g, n, getattr(g, n)) for g in self._groups for n in _DIVISION]
        for group in self._groups:
            group.gradient_divide_factor = 1.0
            group.force_sum_reduction_for_comms = True

    def reset(self) -> None:
        for root in self._roots:
            if _forwards_of(root) is not None:
                root.reset_iter_state()
        for owner, name, value in self._switches:
            setattr(owner, name, value)
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad._local_tensor for p in self.parameters if p.grad is not None]

    def source_of_call(self) -> int:
        """Which parameter group gathers, by the frames that call: nothing of FSDP is wrapped for it."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "unshard":
                owner = frame.f_locals.get("self")
                for index, group in enumerate(self._groups):
                    if owner is group:
                        return index
            frame = frame.f_back
        return -1

    def shard_of(self, source: int) -> torch.Tensor | None:
        try:
            given = [
                t.flatten() for p in self._groups[source].fsdp_params for t in p.all_gather_inputs
            ]
            return torch.cat(given)
        except Exception:  # of an extension's own form: zeros do, too
            return None


def adapter(roots: Sequence[Any]) -> tuple[_C.ShardedModel, Shards]:
    """The part that sharded modules take in a step. A collective: it makes a group to agree over."""
    shards = Shards(roots)
    mesh = shards.mesh()
    ranks = mesh.mesh.flatten().tolist()
    group = side_group(roots[0], ranks, mesh.get_group(0), torch.device(mesh.device_type))
    return _C.ShardedModel(shards.parameters, group, shards), shards
