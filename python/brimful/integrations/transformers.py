"""Hugging Face Trainer and those that build on it: batches in pieces that fit instead of ``auto_find_batch_size``."""

from __future__ import annotations

from typing import Any

from brimful.integrations._extra import require

require("transformers")

import torch
from transformers import Trainer, TrainerCallback

import brimful
from brimful._process_end import is_out_of_memory
from brimful.integrations._generate_in_pieces import generate_in_pieces
from brimful.integrations._loss_in_pieces import LossInPieces

__all__ = ["BrimfulCallback", "generate_in_pieces"]


class BrimfulCallback(TrainerCallback):
    """``trainer.add_callback(BrimfulCallback(trainer))``: each batch runs in pieces that fit, and logs show the memory.

    The batch stays what it was asked to be, and the loop is never restarted: when memory runs out, on any rank, all
    ranks repeat the batch in smaller pieces. ``options`` are those of ``brimful.BatchSizer`` but ``weight_fn``; with
    ``by_length=True`` pieces are trimmed, and packed batches cut between sequences. Gradients are the
    Trainer's: the mean over the ranks, with its ``num_items_in_batch`` and gradient accumulation. What a loss is a mean
    or sum over is found out in the first steps, on four rows (``loss_rule`` of ``brimful.BatchSizer``), and a loss that
    compares rows raises ``ValueError``; ``loss_rule="whole"`` keeps its batches whole, and ``rows_are_independent``
    says of one that it is a mean over rows. A rank whose data ends before that of others takes part until all end. A
    ``GlobalSampler`` that is the training loader's ``batch_sampler`` learns each step's outcome; its ``lag`` is at
    least that of its loader and ``gradient_accumulation_steps`` more.

    ``evaluate``, ``predict`` and the model's ``generate`` go on in pieces where memory runs out, and so do they in a
    training step that generates.

    Of TRL's trainers ``SFTTrainer`` and ``GRPOTrainer`` are known, with what they log, and of sentence-transformers'
    losses those that are a mean over rows, or a function of the embeddings of all rows, such as a contrastive one:
    these are steps over pairs (``BatchSizer.pair_step``). Others raise ``ValueError`` unless ``rows_are_independent``
    says that theirs is a mean over rows too.

    Logs get ``peak_bytes`` (of this process, since the last log), ``used_bytes``, and ``pieces`` and ``retries`` of the
    last step, before any callback that prints or reports them. Without a trainer only the first two, for callbacks that
    are added later and ``state.log_history``; batches run as ever.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        *,
        rows_are_independent: bool = False,
        **options: Any,
    ) -> None:
        self._loss: LossInPieces | None = None
        if trainer is None:
            return
        if trainer.args.auto_find_batch_size:
            raise ValueError(
                "the Trainer and BrimfulCallback would both search for a batch that fits "
                "(auto_find_batch_size: True); leave it out of TrainingArguments: BrimfulCallback "
                "keeps the batch size and fits the pieces"
            )
        self._loss = LossInPieces(trainer, rows_are_independent, options)
        # What prints and reports was added when the trainer was made, before this callback.
        handler = trainer.callback_handler
        handler.callbacks.insert(0, _Figures(self, handler))
        generate_in_pieces(trainer.model)
        _score_in_pieces(trainer)

    @property
    def sizer(self) -> brimful.BatchSizer | None:
        return None if self._loss is None else self._loss.sizer

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        if self._loss is not None:
            self._loss.follow(train_dataloader)
            if model is not None:  # another one where the Trainer has model_init
                generate_in_pieces(model)
        brimful.memory.reset_peak(args.device)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._loss is None:
            self._add_figures(args, state, logs)

    def _add_figures(self, args: Any, state: Any, logs: dict[str, Any]) -> None:
        stats = brimful.memory.stats(args.device)
        figures = {"peak_bytes": stats.peak_bytes, "used_bytes": stats.used_bytes}
        if self.sizer is not None and (steps := self.sizer.report().history):
            figures |= {"pieces": steps[-1].pieces, "retries": steps[-1].retries}
        logs.update(figures)
        state.log_history[-1].update(figures)
        brimful.memory.reset_peak(args.device)


class _Figures(TrainerCallback):
    """The first one, so that all others see the figures."""

    def __init__(self, of: BrimfulCallback, handler: Any) -> None:
        self._of, self._handler = of, handler

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._of in self._handler.callbacks:
            self._of._add_figures(args, state, logs)


def _score_in_pieces(trainer: Any) -> None:
    """GRPO scores completions of the old and the reference model without gradients, by rows already."""
    score = getattr(trainer, "_get_per_token_logps_and_entropies", None)
    if score is None:
        return

    def in_pieces(
        model: Any,
        input_ids: torch.Tensor,
        *args: Any,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        rows = batch_size or len(input_ids)
        while True:
            try:
                return score(model, input_ids, *args, batch_size=rows, **kwargs)
            except BaseException as error:
                if not is_out_of_memory(error) or torch.is_grad_enabled() or rows == 1:
                    raise
            rows = (rows + 1) // 2

    trainer._get_per_token_logps_and_entropies = in_pieces
