"""What the usual dict of a token model says of its rows: how long they are, where padding lies, which labels count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

IGNORED = -100
#: Entries with a column for each token.
SEQUENCES = (
    "input_ids",
    "attention_mask",
    "labels",
    "position_ids",
    "token_type_ids",
    "inputs_embeds",
    "special_tokens_mask",
)
OWN = "or pass by_length=length_fn, which gives the rows' lengths, with trim_fn"


def is_cut(name: str, value: Any, width: int) -> bool:
    return (
        name in SEQUENCES
        and isinstance(value, torch.Tensor)
        and value.dim() > 1
        and value.size(1) == width
        and not (name == "labels" and value.is_floating_point())
    )


def require_usual(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns. Raises ValueError for entries of other shapes."""
    entry = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    ids = batch[entry]
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2:
        needed = "[rows, tokens]" if entry == "input_ids" else "[rows, tokens, features]"
        shape_text = f", shape: {list(ids.shape)}" if isinstance(ids, torch.Tensor) else ""
        raise ValueError(
            f"{entry} must be a tensor of shape {needed} (type: {type(ids).__name__}{shape_text})"
        )
    rows, width = ids.shape[:2]
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        shape = tuple(value.shape)
        if name == "labels" and (value.dim() == 1 or value.is_floating_point()):
            continue  # one for each row
        if name in SEQUENCES:
            if shape[:2] != (rows, width) or (name != "inputs_embeds" and len(shape) != 2):
                raise ValueError(
                    f"{name} has another shape than the tokens ({name}: {shape}, tokens: {(rows, width)}); pass one "
                    f"of that shape, {OWN}"
                )
        elif width in shape[1:]:
            raise ValueError(
                f"it is not known whether an entry has a column for each token (entry: {name}, shape: {shape}); pass "
                "by_length=length_fn, which gives the rows' lengths, with trim_fn, which says how it is trimmed"
            )
    return rows, width


def row_weights(batch: Mapping[str, Any]) -> list[float | None] | None:
    """By row how many labels count behind the first one, which a causal model drops; None where none does at all."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0 or labels.is_floating_point():
        return None
    counted = labels.cpu().ne(IGNORED)
    if labels.dim() == 1:
        return [1.0 if counts else None for counts in counted.tolist()]
    return _weights(counted.flatten(1))


def _weights(counted: torch.Tensor) -> list[float | None]:
    behind_first, all_of_row = counted[:, 1:].sum(1).tolist(), counted.sum(1).tolist()
    return [float(n) if m > 0 else None for n, m in zip(behind_first, all_of_row, strict=True)]


class Padding:
    """What a batch's mask and labels say of its rows. Waits for their device."""

    def __init__(self, batch: Mapping[str, Any], rows: int, width: int) -> None:
        mask: Any = batch.get("attention_mask")
        labels: Any = batch.get("labels")
        self._width, self._by_mask = width, mask is not None
        tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
        if mask is None and not tokens:
            raise ValueError(
                f"nothing says how long the rows are (entries: {', '.join(map(str, batch))}); pass attention_mask, or "
                "labels that are -100 on padding, " + OWN
            )
        # On the host: a device's memory may be full.
        values = labels.cpu() if tokens else torch.full((rows, width), IGNORED, device="cpu")
        counted = values.ne(IGNORED)
        filled = counted if mask is None else mask.cpu().ne(0)
        columns = torch.arange(width, dtype=torch.int32, device="cpu")
        first = torch.where(filled, columns, width).amin(1).long()
        last = torch.where(filled, columns, -1).amax(1).long()
        at_first = counted.gather(1, first.clamp(max=width - 1).unsqueeze(1)).squeeze(1)
        self._rows = [
            figure.tolist()
            for figure in (
                first,
                last,
                filled.sum(1),
                (counted & (values < 0)).sum(1),
                (counted & ~filled).sum(1),
                at_first,
            )
        ]
        self.weights = _weights(counted) if tokens else row_weights(batch)
        self._require(3, "labels are negative and not -100", "give ignored ones the value -100")
        self._require(4, "labels count where attention_mask is 0", "give them the value -100")
        if mask is not None and any(
            count not in (0, last - first + 1)
            for first, last, count in zip(*self._rows[:3], strict=True)
        ):
            raise ValueError(
                "attention_mask has holes between tokens, and rows cannot be trimmed to what lies between; "
                f"pass rows that are padded at one end, {OWN}"
            )

    def _require(self, figure: int, what: str, remedy: str) -> None:
        bad = next((row for row, n in enumerate(self._rows[figure]) if n > 0), None)
        if bad is not None:
            raise ValueError(f"{what} (row: {bad}, labels: {self._rows[figure][bad]}); {remedy}")

    def lengths(self) -> list[int]:
        _, last, count = self._rows[:3]
        return list(count) if self._by_mask else [end + 1 for end in last]

    def is_left(self) -> bool:
        first, last, count = self._rows[:3]
        filled = [row for row, n in enumerate(count) if n > 0]
        if not self._by_mask or all(first[row] == 0 for row in filled):
            return False
        if all(last[row] == self._width - 1 for row in filled):
            return True
        odd = next(row for row in filled if first[row] > 0)
        other = next(row for row in filled if last[row] < self._width - 1)
        raise ValueError(
            f"rows are padded left as well as right (left: row {odd}, right: row {other}); pad all at one end, {OWN}"
        )

    def require_no_first_label(self) -> None:
        for row, (first, counts) in enumerate(zip(self._rows[0], self._rows[5], strict=True)):
            if 0 < first < self._width and counts:
                raise ValueError(
                    "the label of a first token behind padding counts, and would be predicted from padding "
                    f"(row: {row}); give it the value -100, or pass weight_fn if the model does not shift labels"
                )
