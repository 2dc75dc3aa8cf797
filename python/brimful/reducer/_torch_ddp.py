"""torch's own DistributedDataParallel as a part of a BatchSizer's step.

Its pieces run without its collectives, as under no_sync. When all ranks have their gradients they agree over a group
of their own, and a backward of nothing (-0.0, which changes no bit) into every parameter makes torch's reducer reduce.
What is used of its internals is the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from brimful import _C
from brimful.reducer._side_groups import side_group

TorchDDP = torch.nn.parallel.DistributedDataParallel

#: The last that was used for the side group.
_uuids: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def adapter(model: Any, check_updates: bool) -> _C.TorchDdpAdapter:
    """The part that `model` takes in a step. Its first one is a collective: it makes the group to agree over."""
    refuse(model)
    parameters = trainable(model)
    sparse = {
        p
        for child in model.modules()
        if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse
        for p in child.parameters()
    }
    this = weakref.ref(model)  # the core is no container to the garbage collector

    def reduce(source: int) -> None:
        nothing = [_nothing(p, p in sparse) for p in parameters]
        _reduce(this(), parameters, nothing, source)

    known = _C._configuration_of(model.process_group)

    def follow() -> dist.ProcessGroup | None:
        nonlocal known
        wrapped = this()
        if wrapped is None or not known:  # which no group that can change has
            return None
        now = _C._configuration_of(wrapped.process_group)
        if now == known:
            return None
        known = now
        return _reconfigured(wrapped)

    return _C.TorchDdpAdapter(parameters, _side_group(model), reduce, check_updates, follow)


def _reconfigured(model: Any) -> dist.ProcessGroup:
    """The group to agree over, with the members that the model's own group has now."""
    group, side = model.process_group, _side_group(model)
    own = (side.get_reconfigure_handle(), _uuids.get(model, 0))
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    _uuids[model] = 1 + max(uuid for _, uuid in everyone)
    distributed_c10d._reconfigure(_uuids[model], [handle for handle, _ in everyone], side).wait()
    return side


def trainable(model: Any) -> list[torch.nn.Parameter]:
    return [
        p
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in model.parameters_to_ignore
    ]


def refuse(model: Any) -> None:
    """Raises for what moves torch's collectives into places that cannot be put off."""
    for name, value in (
        ("static_graph", model.static_graph),
        ("mixed_precision", model.mixed_precision is not None),
        ("delay_all_reduce_named_params", bool(getattr(model, "_delay_all_reduce_params", ()))),
        ("optimize_ddp='python_reducer'", getattr(model, "_use_python_reducer", False)),
    ):
        if value:
            raise NotImplementedError(
                f"a BatchSizer cannot put off the collectives of torch's DistributedDataParallel with this "
                f"option (name: {name}); leave it out, or wrap the module in brimful.DistributedDataParallel"
            )


@contextmanager
def _without_collectives(model: Any) -> Iterator[None]:
    agreed_before = model.require_forward_param_sync
    model.require_forward_param_sync = False  # else a forward gives all ranks rank 0's buffers
    try:
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = agreed_before


def local(loss_fn: Callable[..., Any], models: list[Any]) -> Callable[..., Any]:
    """`loss_fn` with forwards that make no collectives."""

    def on_this_rank(model: Any, piece: Any) -> Any:
        with ExitStack() as stack:
            for wrapped in models:
                stack.enter_context(_without_collectives(wrapped))
            return loss_fn(model, piece)

    return on_this_rank


def _side_group(model: Any) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(model.process_group)
    return side_group(model, ranks, model.process_group, model.device)


def _nothing(parameter: torch.Tensor, sparse: bool) -> torch.Tensor:
    if sparse:
        like = {"dtype": parameter.dtype, "device": parameter.device}
        indices = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
        values = torch.empty((0, *parameter.shape[1:]), **like)  # type: ignore[call-overload]
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    zero = torch.full((), -0.0, dtype=parameter.dtype, device=parameter.device)
    return zero.expand_as(parameter)


def _reduce(
    model: Any, parameters: list[torch.nn.Parameter], nothing: list[torch.Tensor], source: int
) -> None:
    reducer = model.reducer
    with torch.enable_grad():
        # Under find_unused_parameters it looks for them in the graph of what is given to it.
        reducer.prepare_for_backward([p.view_as(p) for p in parameters])
        torch.autograd.backward(parameters, nothing)
    reducer._rebuild_buckets()  # collective, once, and else in the next forward
    if model.will_sync_module_buffers():
        with torch.no_grad():
            model._assign_modules_buffers()
            model._sync_module_buffers(source)
