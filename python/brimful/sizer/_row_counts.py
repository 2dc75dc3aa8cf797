"""Rules by which a mean loss may count the rows of a batch: what of its entries counts in each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from brimful.sizer._padding import IGNORED

_NAMES = ("label", "target", "position", "mask", "weight")  # of what a loss is said to go by
_IGNORED = (IGNORED, -1, 0, 255)
_MOST = 46
Counts = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]  # of each row


def tensors_by_place(batch: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The batch's tensors, by their places in it."""
    if isinstance(batch, torch.Tensor):
        return {name or "batch": batch} if batch.layout == torch.strided else {}
    if isinstance(batch, Mapping):
        parts = [(str(key), value) for key, value in batch.items()]
    elif isinstance(batch, (list, tuple)):
        parts = [(str(index), value) for index, value in enumerate(batch)]
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, part in parts:
        found |= tensors_by_place(part, f"{name}.{key}" if name else key)
    return found


class Rule:
    def __init__(self, name: str, counts: Counts | None) -> None:
        self.name = name
        self._counts = counts

    @property
    def is_sum(self) -> bool:
        return self._counts is None

    def rows(self, entries: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        """What each row counts; NaN where the rule says nothing of them."""
        counts = None if self._counts is None else self._counts(entries)
        if counts is None or len(counts) != rows:
            return torch.full((rows,), float("nan") if counts is not None else 1.0)
        return counts.detach().to("cpu", torch.float64)

    def of(self, batch: Any) -> float | None:
        """Of a batch, or a piece of it; None: its number of rows."""
        if self._counts is None or self.name == ROWS:
            return None
        return float(self._counts(tensors_by_place(batch)).sum())


ROWS, SUM, ITEMS = "rows", "sum", "items"


def rules_of(
    entries: Mapping[str, torch.Tensor], rows: int, ignored: Sequence[int], gives_items: bool
) -> list[Rule]:
    """The same list for all batches of a kind."""
    every = {
        name: tensor
        for name, tensor in entries.items()
        if tensor.dim() >= 1 and len(tensor) == rows and not tensor.is_complex()
    }
    named = {n: t for n, t in every.items() if any(part in n.lower() for part in _NAMES)}
    found = named or {n: t for n, t in every.items() if not t.is_floating_point()}
    wide = next((n for n, t in every.items() if t.dim() == 2), None)
    masks = [n for n, t in found.items() if "mask" in n and t.dim() == 2]
    rules: list[Rule] = []
    for name in sorted(found, key=lambda n: ("label" not in n, "target" not in n)):
        rules += _rules_of(name, found[name], wide, masks, [*_IGNORED, *ignored])
    some_rows = next(iter(every), None)
    ones = [] if some_rows is None else [Rule(ROWS, lambda e: torch.ones(len(e[some_rows])))]
    return [*ones, Rule(ITEMS if gives_items else SUM, None), *rules[:_MOST]]


def _rules_of(
    name: str, tensor: torch.Tensor, wide: str | None, masks: list[str], ignored: list[int]
) -> list[Rule]:
    if tensor.is_floating_point():
        is_mask = "mask" in name or "weight" in name
        return [Rule(f"sum of {name}", _entry(name, _by_row))] if is_mask else []
    if tensor.dtype == torch.bool:
        return [Rule(name, _entry(name, _by_row))]
    values = [0] if "mask" in name else list(dict.fromkeys(ignored))
    rules: list[Rule] = []
    for value in values:
        text = name if value == IGNORED else f"{name} != {value}"
        rules.append(Rule(text, _entry(name, partial(_other_than, value, 0))))
        if tensor.dim() == 2:
            after = _entry(name, partial(_other_than, value, 1))
            rules.append(Rule(f"{text}, without the first", after))
    if tensor.dim() == 2 and name not in masks:
        rules += [Rule(f"{name} in {mask}", partial(_within, name, mask)) for mask in masks]
    if tensor.dim() == 1 and wide is not None and "position" in name:
        rules.append(Rule(f"{name} in {wide}", partial(_inside, name, wide)))
    return rules


def _entry(name: str, count: Callable[[torch.Tensor], torch.Tensor]) -> Counts:
    return lambda entries: count(entries[name])


def _other_than(value: int, first: int, labels: torch.Tensor) -> torch.Tensor:
    return _by_row((labels[:, first:] if first else labels) != value)


def _by_row(counted: torch.Tensor) -> torch.Tensor:
    return counted.reshape(len(counted), -1).sum(1, dtype=torch.float64)


def _within(name: str, mask: str, entries: Mapping[str, torch.Tensor]) -> torch.Tensor:
    labels, counted = entries[name], entries[mask]
    if labels.shape != counted.shape:
        return torch.full((len(labels),), float("nan"))
    return _by_row((labels != IGNORED) & (counted != 0))


def _inside(name: str, wide: str, entries: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Positions beyond the row are ignored."""
    return _by_row(entries[name] < entries[wide].size(1))
