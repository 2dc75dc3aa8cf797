"""What a mean loss of a model of transformers is over: the labels of a piece that count, where there are such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_IGNORED = -100
_BY_ROW = ("CTC", "RNNT", "TDT")  # a mean over rows, of which each has its own length


class LabelCounts:
    def __init__(self, trainer: Any, drops_first: bool | None = None) -> None:
        """``drops_first`` says of a trainer's own loss whether each row's first label counts."""
        self._trainer, self._known = trainer, drops_first
        self._last: tuple[Any, float | None] = (None, None)

    def share(self, piece: Mapping[str, Any], whole: Mapping[str, Any], rows: float) -> float:
        """Of the piece in the mean: that of its labels, else ``rows``, that of its rows."""
        if self._last[0] is not whole:
            self._last = whole, self.of(whole)
        every = self._last[1]
        if not every:  # nothing says it, or no label of the batch counts
            return rows
        return (self.of(piece) or 0.0) / every

    def of(self, inputs: Mapping[str, Any]) -> float | None:
        """None where the loss is a mean over rows, or nothing says what it is over."""
        labels = inputs.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
            return None
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        kind = getattr(model, "loss_type", None) or type(model).__name__
        if any(part in kind for part in _BY_ROW):
            return None
        first = 1 if self._drops_first(model, kind) else 0
        return float((labels[..., first:] != _IGNORED).sum())

    def _drops_first(self, model: Any, kind: str) -> bool:
        """A decoder alone predicts a token from those before it."""
        known = self._known
        if known is None and getattr(model, "loss_type", None) is not None:
            known = getattr(self._trainer, "_loss_shifts_labels", None)
        if known is not None:
            return bool(known)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return False
        return any(part in kind for part in ("CausalLM", "LMHead", "ConditionalGeneration"))
