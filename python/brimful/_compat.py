"""Which torch this is. The only Python file that may ask."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

from brimful import _build_info

Function = TypeVar("Function", bound=Callable[..., Any])


def check_torch() -> None:
    """Raises ImportError unless torch is of the minor version, and for the CUDA, that brimful was built with.

    torch keeps no stable binary interface for what brimful uses, so that any other would crash.
    """
    built, installed = _build_info.torch_minor, str(torch.__version__)
    cuda = (torch.version.cuda or "").split(".")[0]
    if cuda != _build_info.torch_cuda:
        built = f"{built} {_cuda_words(_build_info.torch_cuda)}"
        installed = f"{installed} {_cuda_words(cuda)}"
    elif installed.split(".")[:2] == built.split("."):
        return
    raise ImportError(
        f"brimful was built for torch {built} and this is torch {installed}: "
        f"install torch {built}, or build brimful again with `pip install "
        "--no-build-isolation --no-deps --force-reinstall .` in its source folder"
    )


def _cuda_words(major: str) -> str:
    return f"for CUDA {major}" if major else "without CUDA"


def when_cuda_begins(call: Callable[[], None]) -> None:
    """Calls it when this process begins to use CUDA, before the first tensor of a device; now, if it does already."""
    torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]


def optimizers_in_backward() -> int:
    """How many parameters of the process were given to torch's _apply_optimizer_in_backward; cheap."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return len(getattr(module, "param_to_acc_grad_map", ()))


def skipped_by_dynamo(function: Function) -> Function:
    """``torch._dynamo.disable(function, recursive=False)`` without the seconds that importing torch._dynamo takes.

    torch.compile leaves the function alone and compiles what it calls; a call costs nothing more.
    """
    eval_frame.set_code_exec_strategy(
        function.__code__,
        eval_frame._FrameExecStrategy(
            eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        ),
    )
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
