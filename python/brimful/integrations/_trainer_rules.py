"""Which trainers' losses are those of their rows, and how pieces of a batch make up the loss of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from brimful.integrations._label_counts import LabelCounts
from brimful.integrations._loss_over_pairs import LossOverPairs

_OF_ROWS = {"SFTTrainer", "GRPOTrainer"}  # of TRL
_LOSSES_OF_ROWS = {  # of sentence-transformers: a mean over rows
    "ContrastiveLoss",
    "CosineSimilarityLoss",
    "MSELoss",
    "MarginMSELoss",
    "TripletLoss",
}
_OVER_TOKENS_OF_ALL = ("cispo", "dapo", "vespo")  # losses of GRPO with a count of the whole batch


class Rules:
    """Of one trainer; raises ``ValueError`` for one whose batch must stay whole.

    ``rows_are_independent`` says that the loss is a mean over rows, of a trainer or loss that is not known here.
    """

    def __init__(self, trainer: Any, rows_are_independent: bool, by_length: bool = False) -> None:
        self._trainer = trainer
        self.of_trl = _class_of(trainer, "trl")
        self._is_grpo = self.of_trl == "GRPOTrainer"
        self._loss_type = trainer.args.loss_type if self._is_grpo else None
        #: A sum over a count that comes with the batch, which TRL bounds from below: it stays that of the whole.
        self.divides_by_items = self._loss_type in _OVER_TOKENS_OF_ALL
        self.knows_loss = self._is_grpo
        self._labels = LabelCounts(trainer, drops_first=self.of_trl == "SFTTrainer" or None)
        self._by_row = rows_are_independent or self._is_grpo
        self._over_pairs: dict[str | None, LossOverPairs] = {}
        if by_length and _class_of(trainer, "sentence_transformers") is not None:
            raise ValueError(
                "rows by length have one column of tokens, and this trainer's have one for each text (trainer: "
                f"{type(trainer).__name__}); leave by_length out of BrimfulCallback"
            )
        if self.of_trl in _OF_ROWS:
            self._refuse_arguments(by_length)
        elif not rows_are_independent:
            if self.of_trl is not None:
                raise ValueError(
                    "this trainer's batch is not known to be cut by rows "
                    f"(trainer: {type(trainer).__name__}); {_SMALLER}; or pass rows_are_independent=True "
                    "if its loss is a mean over the rows of its tensors"
                )
            self._sort_losses()

    def over_pairs(self, inputs: Mapping[str, Any]) -> LossOverPairs | None:
        """The loss of this batch, if it compares rows."""
        if not self._over_pairs:
            return None
        by_name = isinstance(self._trainer.loss, dict)
        return self._over_pairs.get(inputs.get("dataset_name") if by_name else None)

    def share(self, piece: Mapping[str, Any], whole: Mapping[str, Any], rows: float) -> float:
        """Of a piece in the loss of the whole, of whose rows it has the share ``rows``."""
        if rows == 1 or self._by_row:
            return rows
        return self._labels.share(piece, whole, rows)

    def piece(
        self, piece: Mapping[str, Any], whole: Mapping[str, Any], share: float
    ) -> tuple[dict[str, Any], float]:
        """The inputs of a loss function that has ``share`` of the rows, and the weight of its loss."""
        inputs = dict(piece)
        if not self._is_grpo:
            return inputs, share
        if "pixel_values" in inputs:
            raise ValueError(
                f"a batch of GRPOTrainer with images cannot be cut by rows (entry: pixel_values); {_SMALLER}, without "
                "BrimfulCallback"
            )
        if self._loss_type == "bnpo" and (tokens := float(_completion_mask(whole).sum())) > 0:
            return inputs, float(_completion_mask(piece).sum()) / tokens
        return inputs, share

    def tokens(self, piece: Mapping[str, Any]) -> float:
        """What means in the logs go by."""
        if self._is_grpo:
            return float(_completion_mask(piece).sum())
        labels = piece.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.dim() < 2:
            return 1.0
        return float((labels[..., 1:] != -100).sum())

    def _refuse_arguments(self, by_length: bool) -> None:
        arguments = self._trainer.args
        if getattr(self._trainer, "padding_free", False) and not by_length:
            given = "padding_free" if arguments.padding_free else "packing"
            also = (
                ""
                if given == "padding_free"
                else ", take packing_strategy='wrapped', whose rows are cut as any others"
            )
            raise ValueError(
                f"a batch is one row of sequences here, which is cut between them if asked for ({given}: True); pass "
                f"by_length=True to BrimfulCallback{also}, or leave {given} out of {type(arguments).__name__}"
            )
        over_the_batch = {
            "top_entropy_quantile": getattr(arguments, "top_entropy_quantile", 1.0) != 1.0,
            "entropy_coef": getattr(self._trainer, "_entropy_bonus_enabled", False),
        }
        for name, is_set in over_the_batch.items():
            if is_set:
                raise ValueError(
                    "a batch cannot be cut by rows where its rows are mixed "
                    f"({name}: {getattr(arguments, name, True)}); leave {name} out of {type(arguments).__name__}"
                )

    def _sort_losses(self) -> None:
        kind = _class_of(self._trainer, "sentence_transformers")
        if kind is None:
            return
        losses = self._trainer.loss
        for name, loss in (losses if isinstance(losses, dict) else {None: losses}).items():
            if type(loss).__name__ in _LOSSES_OF_ROWS and _is_mean(loss):
                continue
            if kind != "SentenceTransformerTrainer" or not isinstance(loss, torch.nn.Module):
                raise ValueError(
                    "this loss is not known to be a mean over rows, as one that compares the rows of a batch is not "
                    f"(loss: {type(loss).__name__}); take its Cached... form with mini_batch_size where there is one; "
                    "or pass rows_are_independent=True if no row's loss depends on the others"
                )
            self._over_pairs[name] = LossOverPairs(self._trainer, loss)
        if isinstance(losses, dict) and self._over_pairs and self._processes() > 1:
            raise ValueError(
                "a loss over pairs cannot be computed over ranks when each dataset has its own loss (losses: "
                f"{', '.join(losses)}); pass one loss for all datasets, or train with one process"
            )

    def _processes(self) -> int:
        return int(self._trainer.accelerator.num_processes)


def _is_mean(loss: Any) -> bool:
    """As they are by default: an argument can make a sum of them."""
    reduction = getattr(getattr(loss, "loss_fct", None), "reduction", "mean")
    return reduction == "mean" and getattr(loss, "size_average", True) is True


_SMALLER = (
    "take a smaller per_device_train_batch_size, and as much more of gradient_accumulation_steps"
)


def _class_of(trainer: Any, package: str) -> str | None:
    """The name of the first of its classes that the package has."""
    names = (c.__name__ for c in type(trainer).__mro__ if c.__module__.split(".")[0] == package)
    return next(names, None)


def _completion_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
