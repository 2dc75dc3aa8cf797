"""Models whose parameters are divided over ranks, by FSDP2 (`fully_shard`), tensor parallelism or both, as a part of a
BatchSizer's step.

The core knows the collectives; this answers what only the objects of torch can. What is used of FSDP's internals is
that of torch 2.15.
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


def _values(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard, which needs a gradient if the tensor does; the tensor itself if it has none."""
    shard = _values(tensor)
    return tensor if shard is tensor else shard.detach().requires_grad_(tensor.requires_grad)


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


def _trainable(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    every = dict.fromkeys(p for module in modules for p in module.parameters())
    return [p for p in every if p.requires_grad]


class Shards:
    """What `fully_shard` and `parallelize_module` have made of a model."""

    def __init__(self, roots: Sequence[Any], modules: Sequence[torch.nn.Module]) -> None:
        if roots and not hasattr(roots[0], "reset_iter_state"):
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
        fully_sharded = set(self.parameters)
        trainable = _trainable(modules)
        if any(is_dtensor(p) and p not in fully_sharded for p in trainable):
            # The others of a tensor-parallel model are the same on all of its ranks, and so are their gradients.
            self.parameters = list(dict.fromkeys([*self.parameters, *trainable]))
        self._mesh = self._found_mesh()
        self._ranks = self._mesh.mesh.flatten().tolist()
        self._numbers = {id(group): number for number, group in enumerate(self._groups)}
        self._kind = tuple({type(group) for group in self._groups})
        self._before: list[tuple[Any, str, Any]] = []
        self._switches: list[tuple[Any, str, Any]] = []
        self._require_known()

    def _require_known(self) -> None:
        for group in self._groups:
            if group.gradient_divide_factor not in (None, 1.0):
                raise ValueError(
                    "a step divides gradients by the weight of all ranks' rows (set_gradient_divide_factor: "
                    f"{group.gradient_divide_factor}); leave it out, and weigh the loss: return (mean loss, weight)"
                )

    def devices(self) -> list[torch.device]:
        """Where pieces run, which is not where an offload policy keeps the shards."""
        parts = [torch.device(group.device) for group in self._groups]
        return list(dict.fromkeys(parts or [local(p).device for p in self.parameters]))

    def require_synced(self) -> None:
        if not all(g.reduce_grads and g.all_reduce_grads for g in self._groups):
            raise ValueError(
                "a step reduces the gradients of each of its pieces (set_requires_gradient_sync: False); leave that "
                "out, and pass accumulate=True to add to the gradients of earlier steps"
            )

    def _found_mesh(self) -> Any:
        """The mesh of all ranks that a piece's collectives join."""
        every = [
            *(p.sharded_param for group in self._groups for p in group.fsdp_params),
            *filter(is_dtensor, self.parameters),
        ]
        meshes = sorted(
            dict.fromkeys(p.device_mesh for p in every), key=lambda mesh: -int(mesh.size())
        )
        ranks = set(meshes[0].mesh.flatten().tolist())
        is_inside = all(ranks.issuperset(mesh.mesh.flatten().tolist()) for mesh in meshes)
        if not is_inside or len(self._reducing()) > 1:
            raise TypeError(
                f"modules of one step are divided over the same ranks (meshes: {len(meshes)}); give each mesh a "
                "BatchSizer of its own"
            )
        return meshes[0]

    def side_group(self, module: torch.nn.Module) -> dist.ProcessGroup:
        """For the ranks to agree over. A collective the first time."""
        mesh = self._mesh
        return side_group(module, self._ranks, mesh.get_group(0), torch.device(mesh.device_type))

    def _reducing(self) -> set[tuple[int, ...]]:
        """The ranks over which FSDP reduces gradients, all in one tuple: each of them has rows of its own."""
        return {tuple(g.mesh_info.mesh.mesh.flatten().tolist()) for g in self._groups}

    def rows_of(self, group: dist.ProcessGroup) -> list[int]:
        """By rank, the lowest one with the same rows, as in a tensor-parallel group. A collective."""
        own = [ranks.index(dist.get_rank()) for ranks in self._reducing()]
        places: list[list[int]] = [[]] * len(self._ranks)
        dist.all_gather_object(places, own, group=group)
        return [places.index(place) for place in places]

    def members_of(self, group: dist.ProcessGroup) -> list[int]:
        """Their numbers among the ranks of the step; none if a rank outside of it is one."""
        try:
            return [self._ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
        except ValueError:
            return []

    def spans_all(self) -> bool:
        return bool(self._groups) or len(self._ranks) == dist.get_world_size()

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
        return [_values(p.grad) for p in self.parameters if p.grad is not None]

    def source_of_call(self) -> int:
        """Whose parameters or gradients FSDP moves, by the frames that call: nothing of it is wrapped for that."""
        frame: Any = sys._getframe(1) if self._groups else None
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, self._kind):
                return self._numbers.get(id(owner), -1)
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


def adapter(
    roots: Sequence[Any], modules: Sequence[torch.nn.Module]
) -> tuple[_C.ShardedModel, Shards]:
    """The part that modules with divided parameters take in a step. A collective: it makes a group to agree over."""
    shards = Shards(roots, modules)
    group = shards.side_group(roots[0] if roots else modules[0])
    rows_of = shards.rows_of(group)
    return _C.ShardedModel(shards.parameters, group, shards, rows_of), shards
