"""A step on a device that is lost: the program sees the error that lost it, and every later call fails too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tools.gpu.check import Check, check
from tools.gpu.device import SIMULATED, plant_error
from torch import nn

ASSERT = 710  # cudaErrorAssert
WORDS = "device-side assert triggered"


class Own(Exception):
    """The program's own error, raised when the device is lost already."""


def run(small: bool) -> Iterator[Check]:
    """Last in its process: there is no device afterwards."""
    import brimful

    torch.manual_seed(0)
    table, head = nn.Embedding(100, 8).cuda(), nn.Linear(8, 4).cuda()
    model = nn.Sequential(table, head)
    sizer = brimful.BatchSizer(model)
    rows = torch.randint(100, (16,), device="cuda")
    sizer.step(rows, lambda m, x: m(x).square().mean())
    model.zero_grad()

    def lost(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if SIMULATED:
            plant_error(ASSERT)
        else:
            m[0](x + 1000)  # the kernel asserts; the host learns of it at its next wait
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise Own("by the program") from error
        return m(x).square().mean()

    raised = _raised(lambda: sizer.step(rows, lost))
    yield check("the step raises the program's own error", isinstance(raised, Own), repr(raised))
    cause = getattr(raised, "__cause__", None)
    yield check("the device's error", WORDS in str(cause), _line(cause))
    for name, call in {
        "a wait": torch.cuda.synchronize,
        "an allocation": lambda: torch.empty(64 << 20, device="cuda"),
        "a step": lambda: sizer.step(rows, lambda m, x: m(x).square().mean()),
    }.items():
        later = _raised(call)
        yield check(f"afterwards {name} fails too", WORDS in str(later), _line(later))
    yield check(
        "the error is torch's AcceleratorError",
        type(cause).__name__ == "AcceleratorError",
        type(cause).__name__,
    )
    yield check("brimful.explain knows it", "found its input wrong" in str(brimful.explain(cause)))
    if SIMULATED:
        plant_error(0)


def _raised(call: object) -> BaseException | None:
    assert callable(call)
    try:
        call()
    except Exception as error:
        return error
    return None


def _line(error: object) -> str:
    return str(error).splitlines()[0] if error else "nothing"
