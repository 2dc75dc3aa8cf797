"""Rows in order of length: what the usual dict of a token model holds, and how its pieces are trimmed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from brimful import _C
from brimful._process_end import is_out_of_memory
from brimful.sizer._packed import Packed
from brimful.sizer._padding import (
    IGNORED,
    OWN,
    Padding,
    is_cut,
    require_usual,
    row_weights,
)
from brimful.sizer._trim_check import require_same_loss

__all__ = ["ByLength", "RowsByLength", "in_batch_order", "token_weight"]

_MOST_CHECKS = 4
_MOST_NAMED = 8
NO_LABELS = "no label of the batch counts (rows: {rows}); leave the batch out"
LengthFn = Callable[[Any], Sequence[int]]
Made = TypeVar("Made")
TrimFn = Callable[[Any, int, int], Any]


def token_weight(piece: Mapping[str, Any], *, shift: bool = True) -> int:
    """How many of a piece's ``labels`` count in the mean loss: those that are not -100, without each row's first one.

    For ``loss_fn`` to return beside the mean loss, and for ``weight_fn``. A causal language model predicts a token from
    those before it, and so drops the first label (``shift``); masked models and classifiers of tokens do not. Waits for
    the labels' device.
    """
    labels = piece["labels"]
    return int((labels[:, 1 if shift else 0 :] != IGNORED).sum())


def in_batch_order(
    outputs: Sequence[torch.Tensor], outcome: Any, *, packed: Mapping[str, Any] | None = None
) -> list[torch.Tensor | None]:
    """The rows of ``outputs``, which ``loss_fn`` gathered piece by piece, in the order of the batch.

    An entry for each row of the batch: None for rows that were not run, as no label of theirs counts. ``outcome`` is
    the step's; outputs of attempts before the one that stood are left out. Rows of unequal length stay so. ``packed``
    is the batch, if its sequences lie in one row: there is an entry for each, with its tokens in dimension 0.
    """
    pieces = outputs[len(outputs) - outcome.pieces :]
    if packed is None:
        rows = list(itertools.chain.from_iterable(piece.unbind(0) for piece in pieces))
        has, whole, part = len(rows), sum(outcome.split), "rows"
    else:
        lengths = [_lengths_of(packed)[sequence] for sequence in outcome.order]
        tokens = [piece.squeeze(0) if piece.size(0) == 1 else piece for piece in pieces]
        has, whole, part = sum(len(piece) for piece in tokens), sum(lengths), "tokens"
        rows = list(torch.split(torch.cat(tokens), lengths)) if has == whole else []
    if has != whole:
        raise ValueError(
            f"outputs do not have the {part} of the step ({part}: {has}, of the step: {whole}); "
            f"gather one tensor for each piece, with its {part} in dimension 0"
        )
    if not outcome.order:
        return list(rows)
    ordered: list[torch.Tensor | None] = [None] * (max(outcome.order) + 1)
    for place, row in zip(outcome.order, rows, strict=True):
        ordered[place] = row
    return ordered


def _lengths_of(batch: Mapping[str, Any]) -> list[int]:
    found = Packed.of(batch)
    if found is None:
        raise ValueError(
            f"the batch is not packed (entries: {', '.join(map(str, batch))}); leave packed out"
        )
    return found.lengths


def _beyond_the_limit(make: Callable[[], Made]) -> Made:
    """What is small, and not held to the limit."""
    with _C._Unlimited():
        try:
            return make()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return make()  # once more, without the error's frames


def _bucket(length: int, width: int) -> int:
    """Of 1, 2, 3, 4, 6, 8, 12, 16 ..., for a compiled model."""
    power = 1 << (length - 1).bit_length()
    return min(power // 4 * 3 if power // 4 * 3 >= length else power, width)


class RowsByLength:
    """The rows of one batch that count, the longest first, and the pieces that are made of them."""

    packed = False  #: A piece has its rows one after another, and no padding.
    together = ""  #: The remedy where rows that are run together have another loss.

    def __init__(
        self,
        batch: Any,
        lengths: Sequence[int],
        weights: Sequence[float | None] | None,
        trim: Callable[[Sequence[int], int, bool], Any],
        weight_fn: Callable[[Any], float] | None,
    ) -> None:
        self._batch, self._trim, self._weight_fn = batch, trim, weight_fn
        self.rows = len(lengths)
        counts = [weights is None or weights[row] is not None for row in range(self.rows)]
        #: Row of the batch by place; those of equal length as in the batch, so that a split can be repeated.
        self.order = sorted((r for r in range(self.rows) if counts[r]), key=lambda r: -lengths[r])
        self.lengths = [lengths[row] for row in self.order]
        self._sums = [
            0.0,
            *itertools.accumulate(
                1.0 if weights is None else weights[r] or 0.0 for r in self.order
            ),
        ]
        self._last: tuple[int, int, Any] | None = None

    def whole(self, places: Sequence[int]) -> Any:
        """Rows at these places as the batch has them."""
        return _selected(self._batch, self.rows, [self.order[place] for place in places])

    def is_trimmed(self) -> bool:
        """Whether the shortest row loses anything."""
        last = len(self.order) - 1
        if last < 0:
            return False
        trimmed, whole = _tensors(self.like(last, 1)), _tensors(self.whole([last]))
        return any(a.shape != b.shape for a, b in zip(trimmed, whole, strict=False))

    def piece(self, begin: int, end: int) -> Any:
        """Rows at these places, trimmed to the first of them."""
        piece = self._trim(self.order[begin:end], self.lengths[begin], True)
        if self._weight_fn is not None:
            self._last = begin, end, piece
        return piece

    def note(self, begin: int, end: int) -> str:
        """For an error that comes with the piece."""
        some = ", ".join(map(str, self.order[begin : min(end, begin + _MOST_NAMED)]))
        more = ", ..." if end - begin > _MOST_NAMED else ""
        return (
            f"in a piece of the batch (rows: {some}{more} of {self.rows}, trimmed to length {self.lengths[begin]}); "
            "a model that computes a width from lengths needs rows that are trimmed to that"
        )

    def like(self, place: int, count: int) -> Any:
        """So many rows of the length of the one at this place: from there on, and again from there. A row alone is no
        copy: it is looked at, where memory may be full."""
        some = self.order[place : place + count]
        rows = [some[i % len(some)] for i in range(count)]
        return self._trim(rows, self.lengths[place], count > 1)

    def weight_at(self, place: int) -> float:
        """Of a row by itself."""
        if self._weight_fn is None:
            return self._sums[place + 1] - self._sums[place]
        return float(self._weight_fn(self.like(place, 1)))

    def weight(self, begin: int, end: int) -> float:
        """Of the piece that was made last, or of all rows."""
        if self._weight_fn is None:
            return self._sums[end] - self._sums[begin]
        if self._last is not None and self._last[:2] == (begin, end):
            piece, self._last = self._last[2], None
            return float(self._weight_fn(piece))
        return float(self._weight_fn(self._batch))


class PackedRows(RowsByLength):
    """The sequences of a packed row, the longest first; a piece is a row that has some of them."""

    packed = True
    together = (
        "pass the model cu_seq_lens_q and the like, or position_ids, by which its attention keeps to a sequence, and "
        "give each sequence's first label the value -100; or "
    )

    def __init__(
        self,
        batch: Any,
        packed: Packed,
        weights: Sequence[float | None] | None,
        weight_fn: Callable[[Any], float] | None,
    ) -> None:
        def row(sequences: Sequence[int], length: int, copied: bool) -> Any:
            if copied:
                return packed.row(sequences)
            return _beyond_the_limit(lambda: packed.row(sequences, copied=False))

        super().__init__(batch, packed.lengths, weights, row, weight_fn)
        self._packed = packed

    def whole(self, places: Sequence[int]) -> Any:
        return self._packed.row([self.order[place] for place in places])

    def is_trimmed(self) -> bool:
        """Whether anything is split."""
        return len(self.order) > 1


def _selected(batch: Any, count: int, rows: Sequence[int], copied: bool = True) -> Any:
    """Rows of a batch that has so many: a copy of its tensors', and of the lists' with an entry for each."""
    if isinstance(batch, Mapping):
        return _rebuilt(batch, {k: _selected(v, count, rows, copied) for k, v in batch.items()})
    if isinstance(batch, list | tuple) and len(batch) == count and not _tensors(batch):
        return type(batch)(batch[row] for row in rows)

    def select(part: Any) -> Any:
        if isinstance(part, torch.Tensor) and part.dim() > 0:
            if not copied:
                return part.narrow(0, rows[0], 1)
            return part.index_select(0, torch.tensor(rows, device=part.device))
        return part

    return pytree.tree_map(select, batch)


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, Mapping):
        return [t for value in batch.values() for t in _tensors(value)]
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _rebuilt(like: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    return entries if type(like) is dict else type(like)(entries)  # type: ignore[call-arg]


class ByLength:
    """What a sizer does with rows of unequal length."""

    def __init__(
        self,
        how: bool | str | LengthFn,
        trim_fn: TrimFn | None,
        weight_fn: Callable[[Any], float] | None,
        *,
        few: bool,
    ) -> None:
        if not (how is True or how == "auto" or callable(how)):
            raise TypeError(
                f'by_length is True, "auto", False, or a function that gives the lengths of a batch\'s rows '
                f"(by_length: {how!r})"
            )
        if trim_fn is not None and not callable(how):
            raise ValueError(
                "trim_fn says how rows are trimmed, and nothing says how long they are "
                f"(by_length: {how!r}); pass by_length=length_fn with it"
            )
        self._how, self._trim_fn, self._weight_fn = how, trim_fn, weight_fn
        self._few = few
        self._checks_left = _MOST_CHECKS

    def rows_of(self, batch: Any) -> RowsByLength | None:
        """None for a batch that is not trimmed, with "auto"."""
        return _beyond_the_limit(lambda: self._rows_of(batch))

    def _rows_of(self, batch: Any) -> RowsByLength | None:
        if not isinstance(batch, Mapping) or (
            "input_ids" not in batch and "inputs_embeds" not in batch
        ):
            if self._how == "auto":
                return None
            if not callable(self._how) or self._trim_fn is None:
                raise ValueError(
                    f"by_length trims a dict with input_ids (type: {type(batch).__name__}); pass one, {OWN}"
                )
            return self._of_functions(batch)
        if (packed := Packed.of(batch)) is not None:
            return self._of_packed(batch, packed)
        if self._trim_fn is not None:
            return self._of_functions(batch)
        return self._of_dict(batch)

    def _of_packed(self, batch: Mapping[str, Any], packed: Packed) -> PackedRows:
        if callable(self._how):
            raise ValueError(
                "length_fn is for rows with padding, and packed sequences have none "
                f"(sequences: {len(packed.lengths)}); pass by_length=True"
            )
        weights = packed.weights() if self._weight_fn is None else None
        return PackedRows(batch, packed, weights, self._weight_fn)

    def check(self, rows: RowsByLength, loss_fn: Callable[[Any, Any], Any], model: Any) -> None:
        """At the first step with a row that is trimmed. Raises ValueError where that changes the loss."""
        if self._checks_left == 0 or not rows.is_trimmed():
            return
        try:
            require_same_loss(rows, loss_fn, model)
            self._checks_left = 0
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._checks_left -= 1  # two whole rows have no room now

    def _own_lengths(self, batch: Any) -> list[int]:
        given = self._how(batch)  # type: ignore[operator]
        try:
            lengths = [int(n) for n in (given.tolist() if hasattr(given, "tolist") else given)]
        except (TypeError, ValueError):
            raise TypeError(
                f"length_fn gives an int for each row of the batch (it gave: {type(given).__name__})"
            ) from None
        sizes = {t.size(0) for t in _tensors(batch) if t.dim() > 0}
        bad = next((row for row, n in enumerate(lengths) if n < 1), None)
        if bad is not None:
            raise ValueError(
                f"a row has no length (row: {bad}, length: {lengths[bad]}); leave such rows out of the batch"
            )
        if sizes != {len(lengths)}:
            raise ValueError(
                f"length_fn gives a length for each row (lengths: {len(lengths)}, rows: {sorted(sizes)})"
            )
        return lengths

    def _of_functions(self, batch: Any) -> RowsByLength:
        lengths = self._own_lengths(batch)
        weights = None
        if isinstance(batch, Mapping) and self._weight_fn is None:
            weights = row_weights(batch)

        def trim(rows: Sequence[int], length: int, copied: bool) -> Any:
            piece = _selected(batch, len(lengths), rows, copied)
            return self._trim_fn(piece, 0, len(rows))  # type: ignore[misc]

        return RowsByLength(batch, lengths, weights, trim, self._weight_fn)

    def _of_dict(self, batch: Mapping[str, Any]) -> RowsByLength:
        rows, width = require_usual(batch)
        found = Padding(batch, rows, width)
        lengths, left = found.lengths(), False
        if callable(self._how):
            lengths = self._own_lengths(batch)
        else:
            left = found.is_left()
        weights = None if self._weight_fn is not None else found.weights
        for row, length in enumerate(lengths):
            if length < 1 and (weights is None or weights[row] is not None):
                raise ValueError(
                    f"a row has no length (row: {row}, attention_mask or labels: all zero or ignored); leave it out "
                    f"of the batch, {OWN}"
                )
        if weights is not None and left:
            found.require_no_first_label()
        if self._few:
            lengths = [_bucket(n, width) if n > 0 else n for n in lengths]

        def trim(some: Sequence[int], length: int, copied: bool) -> Any:
            cut = {
                k: v.narrow(1, width - length if left else 0, length) if is_cut(k, v, width) else v
                for k, v in batch.items()
            }
            return _rebuilt(batch, _selected(cut, rows, some, copied))

        return RowsByLength(batch, lengths, weights, trim, self._weight_fn)
