"""What the pieces of a batch leave, by the rows that they had; what was tried and repeated leaves nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar
from unittest.mock import patch

import torch

Left = TypeVar("Left")


class PieceRecords(Generic[Left]):
    """By the first row of a piece; a later piece that begins there takes the place of an earlier one."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[int, Left]] = {}

    def note(self, where: torch.Tensor, left: Left) -> None:
        if len(where) > 0:  # in lockstep a piece may have none
            begin = int(where[0])
            self._records[begin] = (begin + len(where), left)

    def standing(self) -> list[Left]:
        """In the order of rows."""
        return [left for *_, left in self.standing_rows()]

    def standing_rows(self) -> list[tuple[int, int, Left]]:
        """With the first row and the number of rows of each."""
        found, begin = [], 0
        while begin in self._records:
            end, left = self._records[begin]
            found.append((begin, end - begin, left))
            begin = end
        return found


class _Logged(NamedTuple):
    tokens: float
    metrics: dict[str, list[float]]
    seen: float


class PieceMetrics:
    """TRL's trainers log from within their loss function, and gather over the ranks there.

    Ranks differ in their pieces, so that each piece logs for itself, and the ranks meet once, when the step stands.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._records: PieceRecords[_Logged] = PieceRecords()

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Around a step, or an evaluation of a batch, on all ranks."""
        self._records = PieceRecords()
        with patch.multiple(
            self._trainer.accelerator,
            gather=_as_it_is,
            gather_for_metrics=_as_it_is,
            reduce=_as_it_is,
        ):
            yield
        self._merge(self._over_ranks(self._records.standing()))

    def of_piece(self, where: torch.Tensor, tokens: float, compute: Callable[[], Any]) -> Any:
        trainer, mode = self._trainer, self._mode
        kept, seen = trainer._metrics[mode], self._seen
        trainer._metrics[mode] = defaultdict(list)
        try:
            result = compute()
            logged = dict(trainer._metrics[mode])
            self._records.note(where, _Logged(tokens, logged, self._seen - seen))
        finally:
            trainer._metrics[mode] = kept
            self._seen = seen
        return result

    @property
    def _mode(self) -> str:
        return "train" if self._trainer.model.training else "eval"

    @property
    def _seen(self) -> float:
        return getattr(self._trainer, "_total_train_tokens", 0)

    @_seen.setter
    def _seen(self, tokens: float) -> None:
        if hasattr(self._trainer, "_total_train_tokens"):
            self._trainer._total_train_tokens = tokens

    def _over_ranks(self, records: list[_Logged]) -> list[_Logged]:
        if self._trainer.accelerator.num_processes == 1:
            return records
        from accelerate.utils import gather_object

        found: list[_Logged] = gather_object(records)
        return found

    def _merge(self, records: list[_Logged]) -> None:
        self._seen += sum(record.seen for record in records)
        metrics = self._trainer._metrics[self._mode]
        weights = [record.tokens for record in records]
        for name in records[0].metrics if records else ():
            values = [record.metrics[name][-1] for record in records]
            if name == "num_tokens":
                metrics[name] = [self._seen]
            elif name.endswith("_min"):
                metrics[name].append(min(values))
            elif name.endswith("_max"):
                metrics[name].append(max(values))
            else:
                metrics[name].append(_mean(values, weights))


def _mean(values: list[float], weights: list[float]) -> float:
    total = sum(weights)
    if total == 0:
        return sum(values) / len(values)
    pairs = zip(values, weights, strict=True)
    return sum(value * weight for value, weight in pairs if weight > 0) / total


def _as_it_is(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor
