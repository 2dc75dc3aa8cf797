"""What a model returns for pieces of a batch, as what it would return for the whole."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch

Visit = Callable[[torch.Tensor, str], Any]


def tensors_of(outputs: Any, rows: int, without: Container[str]) -> list[torch.Tensor]:
    """Those that have the rows of a piece. Raises ``ValueError`` if there is anything else in the outputs."""
    found: list[torch.Tensor] = []

    def visit(value: Any, name: str) -> None:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != rows:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                "memory ran out, and outputs of pieces cannot be joined where they have no row for each row of "
                f"the piece ({name}: {shape}, rows: {rows}); name it in the config's keys_to_ignore_at_inference, "
                "or take a smaller per_device_eval_batch_size"
            )
        found.append(value)

    _walk(outputs, "output", without, visit)
    return found


def joined(outputs: Any, tensors: Iterable[torch.Tensor], without: Container[str]) -> Any:
    """The structure of one piece's outputs with the tensors of the whole batch, in the order of `tensors_of`."""
    whole: Iterator[torch.Tensor] = iter(tensors)
    return _walk(outputs, "output", without, lambda *_: next(whole))


def _walk(value: Any, name: str, without: Container[str], visit: Visit) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        kept = {k: _walk(v, k, without, visit) for k, v in value.items() if k not in without}
        return type(value)(**kept)
    if isinstance(value, (tuple, list)):
        return type(value)(_walk(entry, name, without, visit) for entry in value)
    return visit(value, name)
