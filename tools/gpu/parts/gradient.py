"""The gradient of a whole batch against that of its pieces, on large models: in fp32, and under bf16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from tools.gpu.check import Check, check
from tools.gpu.device import settle
from tools.gpu.racer import CASES, SMALL_CASES
from torch import nn

PIECES = 4
NAMES = ("GPT-2 fp32",)
ALLOWED = 1.5  # of the whole batch's own distance from the gradient in double precision


def run(small: bool) -> Iterator[Check]:
    """Yields a check for each dtype: pieces lie no further from the gradient in double precision than the whole."""
    for name in NAMES:
        case = (SMALL_CASES if small else CASES)[name]
        torch.manual_seed(0)
        model, x = case.make().cuda(), case.batch().cuda()
        right = _gradient(model.double(), x if not x.is_floating_point() else x.double(), case.loss)
        model.float()
        for dtype in (None, torch.bfloat16):
            found = {}
            for pieces in (1, PIECES):
                found[pieces] = _distance(_in_pieces(model, x, case.loss, dtype, pieces), right)
            words = (
                f"{PIECES} pieces are {found[PIECES]:.2e} off, the whole batch is {found[1]:.2e}"
            )
            good = found[PIECES] <= ALLOWED * found[1] + 1e-12
            value = found[PIECES] / max(found[1], 1e-30)
            yield check(f"{name.split()[0]}, {dtype or torch.float32}", good, words, value)
        del model, right
        settle()


def _gradient(model: nn.Module, x: torch.Tensor, loss: object) -> list[torch.Tensor]:
    assert callable(loss)
    loss(model, x).backward()
    found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def _in_pieces(
    model: nn.Module, x: torch.Tensor, loss: object, dtype: torch.dtype | None, pieces: int
) -> list[torch.Tensor]:
    import brimful

    def loss_fn(model: nn.Module, piece: torch.Tensor) -> torch.Tensor:
        assert callable(loss)
        with contextlib.nullcontext() if dtype is None else torch.autocast("cuda", dtype):
            out: torch.Tensor = loss(model, piece)
        return out

    rows = len(x)
    split = [rows // pieces] * pieces
    outcome = brimful.BatchSizer(model).step(x, loss_fn, split=split)
    assert outcome.pieces == pieces
    found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def _distance(these: list[torch.Tensor], those: list[torch.Tensor]) -> float:
    """By the 2-norm of all gradients."""
    apart = sum(float((a.double() - b).square().sum()) for a, b in zip(these, those, strict=True))
    whole = sum(float(b.square().sum()) for b in those)
    return float((apart / whole) ** 0.5)
