"""Hugging Face Trainer: memory in the logs, and batches in pieces that fit instead of ``auto_find_batch_size``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brimful.integrations._extra import require

require("transformers")

import torch
from transformers import Trainer, TrainerCallback

import brimful
from brimful.integrations._step_as_loss import step_as_loss

__all__ = ["BrimfulCallback"]


class BrimfulCallback(TrainerCallback):
    """``trainer.add_callback(BrimfulCallback(trainer))``: each batch runs in pieces that fit, and logs show the memory.

    The batch stays what it was asked to be, and the loop is never restarted: when memory runs out, on any rank, all
    ranks repeat the batch in smaller pieces. ``options`` are those of ``brimful.BatchSizer``. Gradients are the
    Trainer's: the mean over the ranks, with its ``num_items_in_batch`` and gradient accumulation. A model that returns
    a mean over tokens and takes no ``num_items_in_batch`` is weighted by rows.

    Logs get ``peak_bytes`` (of this process, since the last log), ``used_bytes``, and ``pieces`` and ``retries`` of the
    last step. Without a trainer only the first two, and batches run as ever.
    """

    def __init__(self, trainer: Trainer | None = None, **options: Any) -> None:
        self.sizer: brimful.BatchSizer | None = None
        self._model: torch.nn.Module | None = None
        self._options = options
        if trainer is None:
            return
        if trainer.args.auto_find_batch_size:
            raise ValueError(
                "the Trainer and BrimfulCallback would both search for a batch that fits "
                "(auto_find_batch_size: True); leave it out of TrainingArguments: BrimfulCallback "
                "keeps the batch size and fits the pieces"
            )
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss
        trainer.compute_loss = self._loss_of_batch

    def _loss_of_batch(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if return_outputs or not model.training:
            return self._compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._model is not model:
            self._model = model
            self.sizer = brimful.BatchSizer(
                model, self._trainer.optimizer, weight_fn=lambda _: 1.0, **self._options
            )
        rows = _rows(inputs)

        def loss_fn(model: torch.nn.Module, piece: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
            share = _rows(piece) / rows
            # A loss that is a sum over that number is as much larger as a mean is not.
            items = None if num_items_in_batch is None else num_items_in_batch * share
            return self._compute_loss(model, dict(piece), False, items), share

        assert self.sizer is not None
        return step_as_loss(self.sizer, inputs, loss_fn)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        brimful.memory.reset_peak(args.device)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        stats = brimful.memory.stats(args.device)
        told = {"peak_bytes": stats.peak_bytes, "used_bytes": stats.used_bytes}
        if self.sizer is not None and (steps := self.sizer.report().history):
            told |= {"pieces": steps[-1].pieces, "retries": steps[-1].retries}
        logs.update(told)
        state.log_history[-1].update(told)
        brimful.memory.reset_peak(args.device)


def _rows(inputs: Mapping[str, Any]) -> int:
    return next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor))
