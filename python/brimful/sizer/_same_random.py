"""The random numbers of a whole batch, given again to the rows of its pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brimful import _C


def _generator(args: Any) -> torch.Generator:
    """Of the device that an operation runs on."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.device.type == "cuda":
            return torch.cuda.default_generators[arg.device.index]
    return torch.default_generator


def _range(func: Any, args: Any, kwargs: dict[str, Any], numbers: torch.Tensor) -> tuple[int, ...]:
    """What bounds the integers that are drawn; nothing for other numbers, which are not places of anything."""
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool:
        return ()
    if func.overloadpacket is torch.ops.aten.multinomial:
        return (args[0].shape[-1],)
    return tuple(a for a in (*args, *kwargs.values()) if type(a) is int)


class SameRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what random operations made in the first run of ``log``, by the module that drew it, and puts the same rows
    of it into what they make in the others. Writes to ``log`` whether that went: places of rows are other places in a
    piece."""

    def __init__(self, log: _C._CallLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._kept: dict[str | None, list[tuple[torch.Tensor, tuple[int, ...]]]] = {}
        self._given: dict[str | None, int] = {}
        self._run = self._rows_of_whole = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        generator = _generator(args)
        before = generator.get_state()
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default:
            if self._same(result[1], ()):
                scale = 1 / (1 - args[1]) if args[1] < 1 else 0.0
                result[0].copy_(args[0] * result[1] * scale)
        elif isinstance(result, torch.Tensor) and not any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        ):
            self._same(result, _range(func, args, kwargs or {}, result))
        elif not torch.equal(generator.get_state(), before):
            self._log.drew(False)  # within a result that depends on other things too
        return result

    def _same(self, numbers: torch.Tensor, range_: tuple[int, ...]) -> bool:
        """Keeps the numbers, or overwrites them with those that were kept for these rows."""
        log, module = self._log, self._log.current
        if log.run == 0:
            if log.recording:
                self._kept.setdefault(module, []).append((numbers.detach().clone(), range_))
                self._rows_of_whole = log.rows[1]
            log.drew(True)
            return False
        if log.run != self._run:
            self._run, self._given = log.run, {}
        kept, given = self._kept.get(module, []), self._given.get(module, 0)
        self._given[module] = given + 1
        whole, range_of_whole = kept[given % len(kept)] if kept else (None, range_)
        if self._are_places(range_of_whole, range_):
            log.drew_places()
            return False
        fits = whole is not None and range_ == range_of_whole
        rows = self._rows(whole, numbers) if whole is not None and fits else None
        log.drew(rows is not None)
        if rows is not None:
            numbers.copy_(rows)
        return rows is not None

    def _are_places(self, of_whole: tuple[int, ...], of_piece: tuple[int, ...]) -> bool:
        """Whether what bounds the numbers is the number of rows, of the whole as of the piece."""
        if not of_whole or len(of_whole) != len(of_piece) or of_whole == of_piece:
            return False
        begin, end = self._log.rows
        return max(of_whole) * (end - begin) == max(of_piece) * self._rows_of_whole

    def _rows(self, whole: torch.Tensor, piece: torch.Tensor) -> torch.Tensor | None:
        """What `piece` has to be, if its shape shows which part of the whole it is."""
        if whole.shape == piece.shape:
            return whole
        if whole.dim() != piece.dim():
            return None
        dims = [d for d in range(whole.dim()) if whole.shape[d] != piece.shape[d]]
        begin, end = self._log.rows
        if len(dims) != 1 or piece.shape[dims[0]] % (end - begin):
            return None
        width = piece.shape[dims[0]] // (end - begin)
        if end * width > whole.shape[dims[0]]:
            return None
        return whole.narrow(dims[0], begin * width, (end - begin) * width)
