"""What a communication hook has to look like."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def check_comm_hook(hook: object) -> None:
    """Raise where torch does: ``TypeError`` for what is not callable, ``ValueError`` for annotations of something else.

    Annotations that are text are evaluated; those that cannot be are not looked at.
    """
    if not callable(hook):
        raise TypeError(f"hook must be callable (type: {type(hook)})")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (ValueError, TypeError, NameError, AttributeError, SyntaxError):
        return
    bucket = signature.parameters.get("bucket")
    if bucket is not None:
        _require("its bucket", bucket.annotation, dist.GradBucket)  # type: ignore[attr-defined]
    _require("what it returns", signature.return_annotation, torch.futures.Future[torch.Tensor])


def _require(what: str, annotation: object, expected: object) -> None:
    if annotation is not inspect.Signature.empty and annotation != expected:
        raise ValueError(
            f"a communication hook annotates {what} as something else (annotation: {annotation}, "
            f"expected: {expected}); a hook is hook(state, bucket: torch.distributed.GradBucket) -> "
            "torch.futures.Future[torch.Tensor]"
        )


def builtin_hook(kind: object) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """torch's hook of the same name in Python; its collectives are the same."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if str(kind).endswith("ALLREDUCE"):
        return default_hooks.allreduce_hook
    if str(kind).endswith("FP16_COMPRESS"):
        return default_hooks.fp16_compress_hook
    raise ValueError(f"there is no such hook (comm_hook_type: {kind})")
