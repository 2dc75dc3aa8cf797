"""A sizer's step in the form that trainers know: a loss, on which they call ``backward()`` later.

Between the two they may set gradients to nothing, or scale the loss, so the step's gradients are put aside until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from brimful import _C
from brimful.sizer import BatchSizer


def step_as_loss(sizer: BatchSizer, step: Callable[[], _C.Outcome]) -> torch.Tensor:
    """A step of the sizer, and its loss over all ranks as a tensor.

    ``backward()`` of it adds the step's gradients, times the gradient that comes in, to those that there are.
    """
    parameters = [p for p in sizer._parameters if p.requires_grad]
    before = [p.grad for p in parameters]
    _put(parameters, [None] * len(parameters))
    try:
        outcome = step()
        made = [p.grad for p in parameters]
    finally:
        _put(parameters, before)
    loss = torch.tensor(outcome.loss, device=parameters[0].device)
    handover: torch.Tensor = _Handover.apply(
        torch.zeros_like(loss, requires_grad=True), loss, parameters, made
    )
    return handover


def _put(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


class _Handover(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _: torch.Tensor,  # what needs a gradient, so that there is a backward
        loss: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        ctx.made = list(zip(parameters, gradients, strict=True))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[None, None, None, None]:
        for parameter, gradient in ctx.made:
            if gradient is None:
                continue
            gradient.mul_(scale)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        ctx.made = []
        return None, None, None, None
