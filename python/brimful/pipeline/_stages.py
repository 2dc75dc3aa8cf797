"""What a pipeline knows of its stages: their modules, tensors, keywords, devices and reducers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from brimful import _C
from brimful._modules import batch_norms, closed_over, entries_of
from brimful.reducer import DistributedDataParallel, _torch_ddp

#: Name, callable, parameters, what names in its modules stand for, BatchNorms and keywords.
Parts = tuple[str, Any, list[Any], _C._ModuleEntries, list[Any], list[str] | None]


def _modules_of(function: Any) -> list[torch.nn.Module]:
    """Those that the function is a method of, or has in its closure."""
    cells = [getattr(function, "__self__", None), *closed_over(function)]
    if isinstance(function, functools.partial):
        cells += [function.func, *function.args, *function.keywords.values()]
    inner = [m for cell in cells if inspect.isroutine(cell) for m in _modules_of(cell)]
    return [cell for cell in cells if isinstance(cell, torch.nn.Module)] + inner


def own_modules(stage: Any) -> list[torch.nn.Module]:
    return [stage] if isinstance(stage, torch.nn.Module) else _modules_of(stage)


def parameters_of(stage: Any) -> list[torch.nn.Parameter]:
    return list(dict.fromkeys(p for module in own_modules(stage) for p in module.parameters()))


def _keywords_of(stage: Any) -> list[str] | None:
    """What a stage takes by name, beside its input; None: anything."""
    stage = getattr(stage, "_orig_mod", stage)  # of torch.compile
    function = stage.forward if isinstance(stage, torch.nn.Module) else stage
    schema = getattr(function, "schema", None)  # of TorchScript
    if schema is not None:
        return [argument.name for argument in schema.arguments[2:]]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C, and does not say
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters[1:] if parameter.kind in named]


def parts_of(index: int, stage: Any) -> Parts:
    if not callable(stage):
        raise TypeError(f"a stage is a module or a function (stage: {index}, type: {type(stage)})")
    whole = isinstance(stage, torch.nn.Module)
    modules = own_modules(stage)
    inner = stage.module if isinstance(stage, DistributedDataParallel) else stage
    name = type(inner).__name__ if whole else getattr(stage, "__name__", type(stage).__name__)
    return (
        name,
        stage,
        parameters_of(stage),
        entries_of(modules),
        batch_norms(modules),
        _keywords_of(stage),
    )


def add_loss(parts: list[Parts], loss_fn: Any) -> None:
    """The last stage has what the loss function trains and changes, and no stage has."""
    known = {p for _, _, parameters, *_ in parts for p in parameters}
    name, stage, parameters, _, norms, keywords = parts[-1]
    parameters = [*parameters, *(p for p in parameters_of(loss_fn) if p not in known)]
    entries = entries_of([*own_modules(stage), *own_modules(loss_fn)])
    parts[-1] = name, stage, parameters, entries, norms, keywords


def require_reduced(loss_fn: Any, stages: Sequence[Any]) -> None:
    """Replicas' losses are trained alike, or not at all."""
    modules = [m for s in [*stages, loss_fn] for own in own_modules(s) for m in own.modules()]
    wrapped = [m for m in modules if isinstance(m, DistributedDataParallel)]
    known = {p for m in wrapped for p in m.parameters()}
    known |= {p for stage in stages for p in parameters_of(stage)}
    if wrapped and any(p.requires_grad and p not in known for p in parameters_of(loss_fn)):
        raise ValueError(
            "the stages have replicas and loss_fn has parameters that no reducer has "
            f"(type: {type(loss_fn)}); wrap it in brimful.DistributedDataParallel as the stages are"
        )


def reducers_of(stages: Sequence[Any]) -> list[_C.Reducer]:
    """Of all DistributedDataParallel modules in the stages, each once."""
    modules = [m for stage in stages for m in own_modules(stage)]
    children = list(dict.fromkeys(child for m in modules for child in m.modules()))
    for child in children:
        if isinstance(child, _torch_ddp.TorchDDP):
            raise TypeError(
                "torch's DistributedDataParallel would reduce every microbatch by itself, and its ranks wait for "
                f"one that has failed (type: {type(child)}); wrap the stage in brimful.DistributedDataParallel"
            )
    return [child.reducer for child in children if isinstance(child, DistributedDataParallel)]


def devices_of(stages: Sequence[Any], devices: Sequence[Any] | None) -> list[torch.device]:
    if devices is None:
        found = []
        for stage in stages:
            parameters = stage.parameters() if isinstance(stage, torch.nn.Module) else iter(())
            first = next(parameters, None)
            found.append(torch.device("cpu") if first is None else first.device)
        return found
    chosen = [torch.device(device) for device in devices]
    if not chosen or len(chosen) > len(stages):
        raise ValueError(
            "every device has a stage at least "
            f"(stages: {len(stages)}, devices: {len(chosen)}); give as many devices as stages, or fewer"
        )
    return chosen


def own_device(stages: Sequence[Any], devices: Sequence[Any] | None) -> torch.device:
    """Of a process of several."""
    chosen = devices_of(stages, None) if devices is None else [torch.device(d) for d in devices]
    found = set(chosen)
    if len(found) != 1:
        raise ValueError(
            "a process of a group has all its stages on one device "
            f"(devices: {', '.join(sorted(map(str, found))) or 'none'}); move them to one"
        )
    return found.pop()


def stage_devices(
    stages: Sequence[Any], devices: Sequence[torch.device], schedule: Any, microbatches: int
) -> list[torch.device]:
    """Where the schedule has them."""
    return _C._stage_devices(
        parameters=[parameters_of(stage) for stage in stages],
        devices=devices,
        schedule=schedule,
        microbatches=microbatches,
    )


def move(stages: Sequence[Any], devices: Sequence[torch.device]) -> None:
    for stage, device in zip(stages, devices, strict=True):
        if isinstance(stage, torch.nn.Module):
            stage.to(device)


def _has_last(schedule: Any, group: Any, own: int, microbatches: int) -> bool:
    """Whether the last stage, and with it the loss, is in this process."""
    if group is None:
        return True
    if isinstance(schedule, str):
        schedule = _C.Schedule(schedule, group.size(), microbatches, stages_per_rank=own)
    elif not isinstance(schedule, _C.Schedule):
        schedule = schedule(microbatches)
    return bool(schedule.rank_of_stage[-1] == group.rank())


def placed(
    stages: Sequence[Any],
    devices: Sequence[Any] | None,
    schedule: Any,
    microbatches: int,
    loss_fn: Any,
    group: Any,
) -> tuple[list[torch.device], list[Parts], list[_C.Reducer]]:
    """The ranks' devices, what the stages consist of, and their reducers; moves modules to devices that are given."""
    chosen = devices_of(stages, devices) if group is None else [own_device(stages, devices)]
    own = chosen * len(stages)
    if devices is not None and group is None:
        own = stage_devices(stages, chosen, schedule, microbatches)
    if devices is not None:
        move(stages, own)
    parts = [parts_of(index, stage) for index, stage in enumerate(stages)]
    reducing = [*stages]
    if loss_fn is not None and _has_last(schedule, group, len(stages), microbatches):
        modules = own_modules(loss_fn)
        if devices is not None:
            move(modules, [own[-1]] * len(modules))
        add_loss(parts, loss_fn)
        require_reduced(loss_fn, stages)
        reducing.append(loss_fn)
    return chosen, parts, reducers_of(reducing)
