"""What ``DistributedDataParallel`` finds in the arguments and in the module that it wraps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

FIRST_BUCKET_CAP_MB = 1.0


def require_both(delayed: Any, hooked: Any) -> None:
    if (delayed is None) != (hooked is None):
        raise ValueError(
            "one argument of two is missing (delay_all_reduce_named_params: "
            f"{'none' if delayed is None else 'given'}, param_to_hook_all_reduce: "
            f"{'none' if hooked is None else 'given'}); pass both, or neither: they have no effect"
        )


def default_group() -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def member_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, which new_group() has made something else of on a rank that is not in it."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"this rank is not in the group (rank: {dist.get_rank()}); call it on the group's ranks alone"
        )
    remedy = "; pass its get_group()" if hasattr(group, "get_group") else ""
    raise TypeError(f"group must be a torch.distributed.ProcessGroup (type: {type(group)}){remedy}")


def group_of(group: dist.ProcessGroup | None, device_mesh: Any = None) -> dist.ProcessGroup:
    """The process group that is meant."""
    if device_mesh is not None:
        if group is not None:
            raise ValueError(
                "a process group and a device mesh exclude each other "
                f"(process_group: {group}, device_mesh: {device_mesh}); pass one of them"
            )
        if device_mesh.ndim != 1:
            raise ValueError(
                f"gradients are reduced over one dimension (device_mesh: {device_mesh}); pass a mesh of "
                "one dimension, or the process group of the one that holds replicas"
            )
        return device_mesh.get_group(mesh_dim=0)  # type: ignore[no-any-return]
    if group is not None:
        return member_of(group)
    world = default_group()
    if world is None:
        raise ValueError(
            "the default process group is not initialised (process_group: None); call "
            "torch.distributed.init_process_group first, or pass process_group"
        )
    return world


def bucket_caps(cap_mb: float | None, caps_mb: Sequence[float] | None) -> dict[str, Any]:
    """The core's options for caps, in MiB; a cap that is None is the planner's decision."""
    if cap_mb is None:
        first, cap = FIRST_BUCKET_CAP_MB, None
    else:
        first, cap = min(FIRST_BUCKET_CAP_MB, float(cap_mb)), float(cap_mb)
    return {
        "first_bucket_cap_mb": first,
        "bucket_cap_mb": cap,
        "bucket_cap_mb_list": [float(mb) for mb in caps_mb or ()],
    }


def buffers_agree(broadcast: bool | None, forward_sync: bool | None) -> tuple[bool, bool]:
    """Whether buffers are made equal at construction, and after every step."""
    if forward_sync is not None:
        return True, forward_sync
    return (True, True) if broadcast is None else (broadcast, broadcast)


def refuse_wrapped(module: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...]) -> None:
    for name, child in module.named_modules():
        if isinstance(child, kinds):
            where = f"a part of the module (name: {name!r})" if name else "the module"
            raise ValueError(
                f"{where} is wrapped already (type: {type(child).__name__}), and its gradients would be reduced "
                "twice; wrap the whole alone, with the part's .module in its place"
            )


class Contents:
    """What takes part of a module, each tensor once: what its ``_ddp_params_and_buffers_to_ignore`` names does not."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.names: list[str] = []
        self.trainable: list[torch.nn.Parameter] = []
        self.sparse: list[bool] = []  # is the parameter's gradient a sparse tensor?
        self.renormalised: list[bool] = []  # does forward change it, by its rows of the batch?
        self.frozen: list[torch.nn.Parameter] = []
        self.buffers: list[Place] = []
        seen: set[torch.Tensor] = set()
        for prefix, child in module.named_modules():
            embeds = isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            sparse = embeds and child.sparse
            renormalised = embeds and child.max_norm is not None
            for name, tensor in _own(child._parameters, prefix, self.ignored, seen):
                _check(name, tensor)
                if not tensor.requires_grad:
                    self.frozen.append(tensor)
                    continue
                self.names.append(name)
                self.trainable.append(tensor)
                self.sparse.append(sparse)
                self.renormalised.append(renormalised)
            for name, buffer in _own(child._buffers, prefix, self.ignored, seen):
                _check(name, buffer)
                self.buffers.append(Place(child._buffers, name.rpartition(".")[2], buffer, name))


def _own(
    tensors: dict[str, Any], prefix: str, ignored: frozenset[str], seen: set[torch.Tensor]
) -> Iterable[tuple[str, Any]]:
    for name, tensor in tensors.items():
        full_name = f"{prefix}.{name}" if prefix else name
        if tensor is not None and full_name not in ignored and tensor not in seen:
            seen.add(tensor)
            yield full_name, tensor


def _check(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise ValueError(
            f"a lazy module has no shapes yet (name: {name}); run a forward before wrapping it"
        )
    if tensor.is_meta:
        raise ValueError(
            f"a tensor on the meta device has no values (name: {name}); call module.to_empty and "
            "initialise it before wrapping it, or name it in _ddp_params_and_buffers_to_ignore"
        )
    if type(tensor.data).__name__ == "DTensor":
        raise TypeError(
            f"DTensor parameters are reduced by whoever sharded them (parameter: {name}); "
            "give a module of fully_shard or tensor parallelism to a BatchSizer as it is"
        )
    if hasattr(tensor, "_in_backward_optimizers"):
        raise NotImplementedError(
            f"an optimizer that runs in backward would see this rank's gradient alone (parameter: {name}); "
            "call optimizer.step() after backward instead of _apply_optimizer_in_backward"
        )


class Place(NamedTuple):
    """Where a module keeps a buffer, whose tensor it may replace in any forward."""

    owner: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor
    name: str


def check_device(
    trainable: Sequence[torch.Tensor],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device | None:
    """The device that inputs are moved to, if any."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"one process drives one device (device_ids: {device_ids}); start one process per device"
        )
    devices = {parameter.device for parameter in trainable}
    if not device_ids and output_device is None:
        return None
    if len(devices) != 1 or next(iter(devices)).type == "cpu":
        raise ValueError(
            "device_ids and output_device are for modules on one accelerator (device_ids: "
            f"{device_ids}, output_device: {output_device}, devices: {sorted(map(str, devices))}); "
            "leave them out"
        )
    if not device_ids:
        return None
    first = device_ids[0]
    if isinstance(first, int):
        return torch.device(next(iter(devices)).type, first)
    return torch.device(first)
