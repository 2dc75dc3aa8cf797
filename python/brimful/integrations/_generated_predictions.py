"""A ``Seq2SeqTrainer``'s prediction with generation, on pieces of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Seq2SeqTrainer

import brimful
from brimful.integrations._generated import Padding, joined
from brimful.integrations._label_counts import LabelCounts
from brimful.integrations._piece_records import PieceRecords

Prediction = tuple[Any, Any, Any]  # loss, tokens, labels


def generates(trainer: Any, loss_only: bool) -> bool:
    """Whether its ``prediction_step`` calls ``generate``, and is the one that is known."""
    own = type(trainer).prediction_step is getattr(Seq2SeqTrainer, "prediction_step", None)
    return own and bool(trainer.args.predict_with_generate) and not loss_only


def predicted_in_pieces(
    trainer: Any,
    batch: tuple[Mapping[str, Any], torch.Tensor],
    cuts: Mapping[str, Any],
    predict: Callable[[dict[str, Any]], Prediction],
) -> Prediction:
    """``batch`` has the inputs and the numbers of their rows, and ``predict`` the trainer's own for some of them."""
    records: PieceRecords[tuple[Any, dict[str, Any], float]] = PieceRecords()
    counts = LabelCounts(trainer)

    def fn(piece: tuple[Mapping[str, Any], torch.Tensor]) -> torch.Tensor:
        part, where = piece
        loss, tokens, labels = predict(dict(part))
        counted = counts.of(part)
        weight = float(len(where)) if counted is None else counted
        records.note(where, (loss, {"sequences": tokens, "labels": labels}, weight))
        return where

    brimful.map_batches(fn, batch, pieces=2, **cuts)
    standing = records.standing_rows()
    losses = [(loss, weight) for *_, (loss, _, weight) in standing if weight > 0]
    total = sum(weight for _, weight in losses)
    has_loss = bool(losses) and losses[0][0] is not None
    loss = sum(loss * (weight / total) for loss, weight in losses) if has_loss else None
    if loss is None and standing:
        loss = standing[0][2][0]  # none, or of labels of which none counts
    padding = Padding(trainer.model, getattr(trainer, "_gen_kwargs", {}), None)
    parts = [(begin, rows, outputs) for begin, rows, (_, outputs, _) in standing]
    whole = joined(parts, padding)
    return loss, whole["sequences"], whole["labels"]
