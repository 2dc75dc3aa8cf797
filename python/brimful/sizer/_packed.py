"""A batch whose sequences lie one after another in a single row, and rows of the same form that have some of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from brimful.sizer._padding import IGNORED, SEQUENCES, row_weights

_ENDS = ("cu_seq_lens", "cu_seqlens")
_LONGEST = ("max_length_", "max_seqlen")
_NUMBERS = "seq_idx"
_MARKS = (*_ENDS, _NUMBERS)
_REMEDY = (
    "give the token at which each sequence begins, and the number of tokens at the end, as transformers' "
    "DataCollatorWithFlattening does"
)


def _begins_with(name: Any, beginnings: tuple[str, ...]) -> bool:
    return isinstance(name, str) and name.startswith(beginnings)


class _OneRow(dict[str, Any]):
    """What the core counts of a packed batch, whose entries other than the tokens may have no rows."""

    __slots__ = ("whole",)  # no attribute that a piece would have whole

    whole: Any


def counted(batch: Any) -> Any:
    """The batch, or what stands for it where it is packed."""
    if not isinstance(batch, Mapping) or not any(_begins_with(name, _MARKS) for name in batch):
        return batch
    found = _OneRow(tokens=_tokens_of(batch))
    found.whole = batch
    return found


def whole_of(batch: Any) -> Any:
    return batch.whole if isinstance(batch, _OneRow) else batch


def _tokens_of(batch: Mapping[str, Any]) -> Any:
    ids = batch.get("input_ids")
    return batch.get("inputs_embeds") if ids is None else ids


class Packed:
    """Sequences of such a batch. Raises ``ValueError`` for places that cannot be, and for entries of unknown form."""

    def __init__(self, batch: Mapping[str, Any], ends: list[int]) -> None:
        self._ends = ends
        self.tokens = ends[-1]
        self.lengths = [end - begin for begin, end in itertools.pairwise(ends)]
        self._batch: dict[Any, Any] = dict(batch)
        self._type = type(batch)
        for name, value in batch.items():
            self._require_usual(name, value)

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Packed | None:
        """None for a batch that is not packed. Waits for its device."""
        ids = _tokens_of(batch)
        given = [name for name in batch if _begins_with(name, _MARKS)]
        if not isinstance(ids, torch.Tensor) or ids.dim() < 2 or ids.size(0) != 1:
            if given:
                raise ValueError(
                    f"packed sequences lie in one row (entry: {given[0]}, tokens: "
                    f"{tuple(getattr(ids, 'shape', ()))}); pass rows of shape [1, tokens], or rows with padding and "
                    f"no {given[0]}"
                )
            return None
        ends = _ends_of(batch, ids.size(1))
        return None if ends is None else cls(batch, ends)

    def weights(self) -> list[float | None] | None:
        """By sequence how many labels count behind the first one; None where none does at all."""
        labels = self._batch.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
            return row_weights(self._batch)
        counted = labels[0].cpu().ne(IGNORED)
        sums = [0, *counted.cumsum(0).tolist()]
        first = counted[self._ends[:-1]].tolist()
        bad = next((place for place, counts in enumerate(first) if counts and place > 0), None)
        if bad is not None:
            raise ValueError(
                "the label of a sequence's first token counts, and would be predicted from the sequence before it "
                f"(sequence: {bad}, token: {self._ends[bad]}); give it the value -100, or pass weight_fn if the model "
                "does not shift labels"
            )
        if first[0]:
            # Dropped in the batch, and not in a row where another sequence comes before it.
            self._batch["labels"] = labels.clone()
            self._batch["labels"][:, 0] = IGNORED
        numbers = zip(self._ends, self._ends[1:], first, strict=False)
        of_each = [(sums[end] - sums[begin], counts) for begin, end, counts in numbers]
        return [float(n - counts) if n > counts else None for n, counts in of_each]

    def row(self, sequences: Sequence[int], copied: bool = True) -> Any:
        """A row that has these, one after another. One sequence alone need be no copy."""
        entries = {n: self._entry(n, v, sequences, copied) for n, v in self._batch.items()}
        return entries if self._type is dict else self._type(entries)  # type: ignore[call-arg]

    def _entry(self, name: Any, value: Any, sequences: Sequence[int], copied: bool) -> Any:
        lengths = [self.lengths[sequence] for sequence in sequences]
        if _begins_with(name, _ENDS):
            return value.new_tensor([0, *itertools.accumulate(lengths)])
        if _begins_with(name, _LONGEST):
            longest = max(lengths)
            return torch.full_like(value, longest) if isinstance(value, torch.Tensor) else longest
        if name == _NUMBERS:
            numbers = [n for n, length in enumerate(lengths) for _ in range(length)]
            return value.new_tensor(numbers).reshape(*value.shape[:-1], -1)
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if value.dim() > 1 and name in SEQUENCES:
                parts = [value.narrow(1, self._ends[s], self.lengths[s]) for s in sequences]
                return torch.cat(parts, 1) if copied or len(parts) > 1 else parts[0]
            if value.size(0) == len(self.lengths):
                return value[list(sequences)]
        if isinstance(value, list | tuple) and len(value) == len(self.lengths):
            return type(value)(value[sequence] for sequence in sequences)
        return value

    def _require_usual(self, name: Any, value: Any) -> None:
        if name in (*SEQUENCES, _NUMBERS) and isinstance(value, torch.Tensor):
            of_sequences = name == "labels" and value.shape[:1] == (len(self.lengths),)
            if value.shape[:2] != (1, self.tokens) and not of_sequences:
                raise ValueError(
                    f"{name} has another shape than the tokens ({name}: {tuple(value.shape)}, tokens: "
                    f"{(1, self.tokens)}); pass one of that shape"
                )
        elif not _begins_with(name, _ENDS):
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and self.tokens in leaf.shape:
                    raise ValueError(
                        "it is not known whether an entry has a column for each token "
                        f"(entry: {name}, shape: {tuple(leaf.shape)}); leave it out, or make it in loss_fn"
                    )


def _ends_of(batch: Mapping[str, Any], tokens: int) -> list[int] | None:
    """Where sequences end, from what says it: places, numbers of sequences, or positions that begin again."""
    names = [name for name in batch if _begins_with(name, _ENDS)]
    found = {name: _checked_ends(name, batch[name], tokens) for name in names}
    for name in names:
        if found[name] != found[names[0]]:
            raise ValueError(
                f"queries and keys have other sequences ({names[0]}: {found[names[0]]}, {name}: {found[name]}); "
                "pass the same places for both"
            )
    if names:
        return found[names[0]]
    numbers, positions = batch.get(_NUMBERS), batch.get("position_ids")
    if numbers is not None:
        shape = tuple(getattr(numbers, "shape", ()))
        if shape != (1, tokens):
            raise ValueError(
                f"{_NUMBERS} has no number for each token ({_NUMBERS}: {shape}, tokens: {(1, tokens)}); pass a tensor "
                "of that shape"
            )
        begins = numbers[0].diff().ne(0)
    elif (
        isinstance(positions, torch.Tensor)
        and positions.shape == (1, tokens)
        and batch.get("attention_mask") is None  # else models do not look at positions
    ):
        begins = positions[0].diff().ne(1)
    else:
        return None
    inner = (begins.cpu().nonzero().flatten() + 1).tolist()
    return [0, *inner, tokens] if inner or numbers is not None else None


def _checked_ends(name: str, value: Any, tokens: int) -> list[int]:
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.is_floating_point():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"{name} is a tensor of whole numbers in a row ({name}: {shape}); {_REMEDY}"
        )
    ends: list[int] = value.tolist()
    if len(ends) < 2 or ends[0] != 0:
        raise ValueError(f"{name} does not begin at 0 ({name}: {ends[:4]}); {_REMEDY}")
    if (at := next((k for k, (a, b) in enumerate(itertools.pairwise(ends)) if b <= a), -1)) >= 0:
        raise ValueError(
            f"{name} does not rise (at: {at + 1}, values: {ends[at]} and {ends[at + 1]}); {_REMEDY}, and leave empty "
            "sequences out"
        )
    if ends[-1] != tokens:
        raise ValueError(
            f"{name} does not end at the number of tokens (last: {ends[-1]}, tokens: {tokens}); {_REMEDY}"
        )
    return ends
