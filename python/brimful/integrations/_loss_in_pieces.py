"""A Hugging Face trainer's loss function, in training and in evaluation, on pieces of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from transformers import Seq2SeqTrainer, Trainer

import brimful
from brimful import _C
from brimful._modules import unwrapped
from brimful._process_end import is_out_of_memory
from brimful.integrations._generated_predictions import generates, predicted_in_pieces
from brimful.integrations._joined_outputs import joined, tensors_of
from brimful.integrations._piece_records import PieceMetrics, PieceRecords
from brimful.integrations._step_as_loss import step_as_loss
from brimful.integrations._trainer_rules import Rules
from brimful.integrations._uneven_ends import NoBatch, UnevenEnds
from brimful.sampler import global_sampler_of
from brimful.sizer._loss_rules import GIVEN, LossRules, Use
from brimful.sizer._packed import Packed
from brimful.sizer._parts import Parts

Result = tuple[Any, Any, float]  # loss, outputs and weight of a piece


class _Sizer(brimful.BatchSizer):
    """One whose pieces ``LossInPieces`` weighs, by the rule that the step finds."""

    def __init__(self, of: LossInPieces, *args: Any, **options: Any) -> None:
        self._of = of
        super().__init__(*args, **options)

    def _make_rules(self, loss_rule: str | None, parts: Parts) -> LossRules | None:
        return self._of.rules_for(parts.modules, self._splitter)

    def _rule_of(self, batch: Any, loss_fn: Callable[[Any, Any], Any]) -> Use | None:
        if self._rules is None or batch is None:
            return None
        return self._of.rule_of(self._rules, self._model, batch)

    def _weighed(self, loss_fn: Callable[[Any, Any], Any], use: Use) -> Callable[[Any, Any], Any]:
        self._of.use = use
        return loss_fn


class LossInPieces:
    """``compute_loss`` and ``prediction_step`` in the place of a trainer's. ``options`` are those of ``BatchSizer``."""

    def __init__(self, trainer: Any, rows_are_independent: bool, options: dict[str, Any]) -> None:
        self.sizer: brimful.BatchSizer | None = None
        self._sampler: brimful.GlobalSampler | None = None
        self._by_length = options.get("by_length") not in (None, False)
        self._rules = Rules(trainer, rows_are_independent, self._by_length)
        if "weight_fn" in options:
            raise ValueError(
                "the trainer's loss says what a piece weighs (weight_fn: given); leave weight_fn out of BrimfulCallback"
            )
        self._metrics = PieceMetrics(trainer) if self._rules.of_trl else None
        self._size_fn: Callable[[Any], int] = options.get("size_fn") or self._rows_or_tokens
        self._cuts = _of_numbered_rows(options)
        self._loss_rule = _loss_rule_of(options, rows_are_independent)
        others = {name: value for name, value in options.items() if name != "loss_rule"}
        self._options = {**others, **self._cuts, "weight_fn": lambda _: 1.0}
        self._items: Any = None  # of the batch that is under way
        self.use: Use | None = (
            None  # how its loss is composed; None: as the trainer's is known to be
        )
        self._rules_of_evaluation: LossRules | None = None
        self._placed = 0  # rows by length, or packed tokens, that a step's pieces have had
        self._is_packed = False
        self._trainer = trainer
        self._model: torch.nn.Module | None = None
        self._compute_loss = trainer.compute_loss
        self._prediction_step = trainer.prediction_step
        self._evaluates_in_pieces = self._loss_only = False
        self._ignored: list[str] | None = None
        self._ends = UnevenEnds(trainer)
        trainer.compute_loss = self._loss_of_batch
        trainer.prediction_step = self._predict

    def _loss_of_batch(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if return_outputs or not model.training:
            return self._evaluate(model, inputs, return_outputs, num_items_in_batch)
        if self._model is not model:
            self._model = model
            self.sizer = _Sizer(self, model, self._trainer.optimizer, **self._options)
            self._rules_of_evaluation = None
            self.sizer._keepers = ((self._begin_placing, self._begin_placing),)
        factor = self._ends.factor()
        batch = self._batch_of(inputs)

        sizer = self.sizer
        assert sizer is not None
        sizer._sampler = self._sampler
        if (pairs := self._rules.over_pairs(inputs)) is not None:
            return step_as_loss(sizer, lambda: pairs.step(sizer, batch, factor))

        # Shares are unequal: a mean over each rank's rows counts by them, and one over the items of all counts once.
        by_rows = self._sampler is not None and num_items_in_batch is None
        times = self._size_fn(inputs) if by_rows and batch is not brimful.NO_DATA else 1

        def loss_fn(model: torch.nn.Module, piece: Any) -> tuple[torch.Tensor, float]:
            piece = self._with_places(piece) if self._by_length else piece
            loss, weight = self._of_piece(model, inputs, piece, num_items_in_batch, False, factor)
            rule = None if self.use is None else self.use.rule
            return loss, weight * (times if rule is None or not rule.is_sum else 1)

        self._items = num_items_in_batch
        try:
            with self._logged_once():
                return step_as_loss(sizer, lambda: sizer.step(batch, loss_fn))
        finally:
            self._is_packed = False
            self.use = self._items = None

    def rules_for(
        self, models: list[torch.nn.Module], splitter: _C.Splitter, gradients: bool = True
    ) -> LossRules | None:
        if self._rules.knows_loss:
            return None
        return LossRules(
            models,
            splitter,
            self._loss_rule,
            inputs_of=lambda batch: batch[0] if isinstance(batch, tuple) else batch,
            gradients=gradients,
        )

    def rule_of(self, rules: LossRules, model: Any, batch: Any) -> Use | None:
        if self._is_packed:
            return None
        plain, items = unwrapped(model), self._items

        def loss_of(piece: Any) -> Any:
            inputs = dict(piece[0] if isinstance(piece, tuple) else piece)

            def compute() -> Any:
                return self._compute_loss(plain, inputs, False, items)

            if self._metrics is None:
                return compute()
            return self._metrics.of_piece(torch.arange(0), 0.0, compute)  # leaves nothing

        return rules.use(batch, loss_of, gives_items=items is not None, ignored=_ignored_by(plain))

    def _use_in_evaluation(self, model: Any, inputs: Any, items: Any) -> Use | None:
        if self._rules_of_evaluation is None:
            splitter = _C.Splitter(**self._cuts)
            self._rules_of_evaluation = self.rules_for([model], splitter, gradients=False)
        if self._rules_of_evaluation is None:
            return None
        self._items = items
        use = self.rule_of(self._rules_of_evaluation, model, self._numbered(inputs))
        if use is not None:
            use.vote.settle()
        return use

    def _batch_of(self, inputs: Mapping[str, Any]) -> Any:
        """What the sizer's step gets; rows by length keep no number beside them."""
        if isinstance(inputs, NoBatch):
            return brimful.NO_DATA
        if not self._by_length:
            return self._numbered(inputs)
        with suppress(ValueError):  # the step raises it, on all ranks
            self._is_packed = _packed_of(inputs) is not None
        return inputs

    def _begin_placing(self, _: None = None) -> None:
        self._placed = 0

    def _with_places(self, piece: Any) -> tuple[Any, torch.Tensor]:
        begin, self._placed = self._placed, self._placed + self._size_fn(piece)
        return piece, torch.arange(begin, self._placed, device="cpu")

    def _rows_or_tokens(self, inputs: Mapping[str, Any]) -> int:
        """Of a packed batch, which is a single row, its tokens."""
        return int(inputs["input_ids"].numel()) if self._is_packed else _rows(inputs)

    def follow(self, loader: object) -> None:
        """A ``GlobalSampler`` of this loader learns each step's outcome."""
        self._sampler = global_sampler_of(loader)

    def _logged_once(self) -> AbstractContextManager[None]:
        return self._metrics.of_step() if self._metrics is not None else nullcontext()

    def _numbered(self, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], torch.Tensor]:
        return inputs, torch.arange(self._size_fn(inputs), device="cpu")

    def _of_piece(
        self,
        model: torch.nn.Module,
        whole: Mapping[str, Any],
        piece: tuple[Mapping[str, Any], torch.Tensor],
        items: Any,
        return_outputs: bool,
        factor: float = 1.0,
    ) -> tuple[Any, float]:
        part, where = piece
        rows = self._size_fn(part) if self._is_packed else len(where)
        rule = None if self.use is None else self.use.rule
        if self.use is not None and rule is not None:
            share = self.use.share(part, rows / self._size_fn(whole))
        else:
            share = self._rules.share(part, whole, rows / self._size_fn(whole))
        inputs, weight = self._rules.piece(part, whole, share)
        scaled, larger = items, 1.0
        if self._rules.divides_by_items or (rule is not None and rule.is_sum):
            # A sum is as much larger as a mean is not.
            is_shared = items is not None or self._rules.divides_by_items
            larger = 1 / (share * (factor if is_shared else 1.0)) if share > 0 else 1.0
        elif rule is None and items is not None and share > 0:
            scaled = items * (share * factor)
            if self._metrics is not None and scaled < 1:  # TRL divides by one
                scaled, larger = items, 1 / (share * factor)

        def compute() -> Any:
            return self._compute_loss(model, inputs, return_outputs, scaled)

        if self._metrics is None:
            result = compute()
        else:
            result = self._metrics.of_piece(where, self._rules.tokens(part), compute)
        loss, *outputs = result if return_outputs else (result,)
        # A mean over no label counts nothing.
        loss = loss * larger if share > 0 else loss.nan_to_num()
        return ((loss, *outputs) if return_outputs else loss), weight

    def _evaluate(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], return_outputs: bool, items: Any
    ) -> Any:
        def compute(piece: Any) -> Result:
            result, weight = self._of_piece(model, inputs, piece, items, return_outputs)
            loss, outputs = result if return_outputs else (result, None)
            return loss, {} if self._loss_only and return_outputs else outputs, weight

        def whole() -> Any:
            if self._metrics is None:
                return self._compute_loss(model, dict(inputs), return_outputs, items)
            return self._of_piece(model, inputs, self._numbered(inputs), items, return_outputs)[0]

        def in_pieces() -> Any:
            if (pairs := self._rules.over_pairs(inputs)) is not None:
                return pairs.evaluate(model, self._numbered(inputs), self._cuts), {}
            packed = _packed_of(inputs) if self._by_length else None
            self.use = self._use_in_evaluation(model, inputs, items) if packed is None else None
            return self._in_pieces(inputs, compute)

        try:
            with self._logged_once():
                result = self._whole_or_in_pieces(whole, in_pieces)
        finally:
            self.use = self._items = None
        return result if return_outputs or not isinstance(result, tuple) else result[0]

    def _whole_or_in_pieces(self, whole: Callable[[], Any], in_pieces: Callable[[], Any]) -> Any:
        """What ``whole`` returns, or loss and outputs of all pieces where memory runs out or ran out before."""
        if not self._evaluates_in_pieces or torch.is_grad_enabled():
            try:
                return whole()
            except BaseException as error:
                if not is_out_of_memory(error) or torch.is_grad_enabled():
                    raise
                self._evaluates_in_pieces = True
        return in_pieces()

    def _in_pieces(
        self, inputs: Mapping[str, Any], compute: Callable[[Any], Result]
    ) -> tuple[Any, Any]:
        records: PieceRecords[Result] = PieceRecords()
        batch, cuts = self._numbered(inputs), self._cuts
        packed = _packed_of(inputs) if self._by_length else None
        if packed is not None:
            self._is_packed = True
            batch, cuts = _of_sequences(inputs, packed)
        ignored = self._ignored
        if ignored is None:
            config = getattr(self._trainer.model, "config", None)
            ignored = getattr(config, "keys_to_ignore_at_inference", ["cache"])
        without = {"loss", *ignored}

        def fn(piece: tuple[Mapping[str, Any], torch.Tensor]) -> tuple[torch.Tensor, ...]:
            where = piece[1]
            loss, outputs, weight = compute(piece)
            is_first = int(where[0]) == 0
            records.note(where, (loss, outputs if is_first else None, weight))
            if len(where) == len(batch[1]):
                return (where,)
            return where, *tensors_of(outputs, len(where), without)

        try:
            _, *tensors = brimful.map_batches(fn, batch, pieces=2, **cuts)
        finally:
            self._is_packed = False
        standing = records.standing()
        if len(standing) == 1:
            return standing[0][:2]
        loss = None
        if standing[0][0] is not None:
            loss = sum(loss * weight for loss, _, weight in standing)
        return loss, joined(standing[0][1], tensors, without)

    def _predict(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        trainer = self._trainer
        self._loss_only, self._ignored = prediction_loss_only, ignore_keys

        def whole() -> Any:  # with a dict of its own, since it may be repeated
            return self._prediction_step(model, dict(inputs), prediction_loss_only, ignore_keys)

        def of_part(part: Mapping[str, Any]) -> Any:
            return self._prediction_step(model, dict(part), prediction_loss_only, ignore_keys)

        def generated() -> Any:
            batch = self._numbered(inputs)
            return predicted_in_pieces(trainer, batch, self._cuts, of_part)

        if generates(trainer, prediction_loss_only):
            with torch.no_grad():
                return self._whole_or_in_pieces(whole, generated)
        if _has_loss(trainer, inputs) or not _is_plain(trainer):
            return self._prediction_step(model, inputs, prediction_loss_only, ignore_keys)

        def compute(piece: Any) -> Result:
            return None, of_part(piece[0])[1], 1.0

        with torch.no_grad():
            result = self._whole_or_in_pieces(whole, lambda: self._in_pieces(inputs, compute))
        return result if len(result) == 3 else (*result, None)


def _loss_rule_of(options: Mapping[str, Any], rows_are_independent: bool) -> str:
    given = options.get("loss_rule")
    if given is not None and given not in GIVEN:
        raise ValueError(
            f"loss_rule is one of {', '.join(map(repr, GIVEN))} (loss_rule: {given!r})"
        )
    return given or ("rows" if rows_are_independent else "find")


def _ignored_by(model: Any) -> list[int]:
    """What a model of transformers may leave out of a mean over labels."""
    config = getattr(model, "config", None)
    names = ("pad_token_id", "semantic_loss_ignore_index")
    found = [getattr(config, name, None) for name in names]
    return [value for value in found if isinstance(value, int)]


def _packed_of(inputs: Any) -> Packed | None:
    known = isinstance(inputs, Mapping) and inputs.get("input_ids") is not None
    return Packed.of(inputs) if known else None


def _of_sequences(
    inputs: Mapping[str, Any], packed: Packed
) -> tuple[tuple[Mapping[str, Any], torch.Tensor], dict[str, Any]]:
    """A batch of one row beside the numbers of its sequences, and how it is cut between them."""

    def split(batch: Any, begin: int, end: int) -> Any:
        return packed.row(range(begin, end)), batch[1][begin:end]

    numbers = torch.arange(len(packed.lengths), device="cpu")
    return (inputs, numbers), {"size_fn": lambda batch: len(batch[1]), "split_fn": split}


def _is_plain(trainer: Any) -> bool:
    """Whether a prediction without labels is the model's outputs."""
    known = (Trainer.prediction_step, Seq2SeqTrainer.prediction_step)
    return type(trainer).prediction_step in known


def _has_loss(trainer: Any, inputs: Any) -> bool:
    """Whether the prediction calls the loss function, which cuts for itself."""
    if not isinstance(inputs, Mapping):  # GRPO's are a list of prompts
        return True
    if trainer.label_names:
        return all(inputs.get(name) is not None for name in trainer.label_names)
    return bool(inputs.get("return_loss") or trainer.can_return_loss)


def _rows(inputs: Mapping[str, Any]) -> int:
    tensors = (value for value in inputs.values() if isinstance(value, torch.Tensor))
    rows = next((len(tensor) for tensor in tensors if tensor.dim() > 0), None)
    if rows is None:
        raise ValueError(
            f"the batch holds no tensor that has rows (keys: {list(inputs)}); pass size_fn and split_fn"
        )
    return rows


def _of_numbered_rows(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say how a batch is cut, for one beside the numbers of its rows."""
    cuts: dict[str, Any] = {}
    if "batch_dim" in options:
        cuts["batch_dim"] = (options["batch_dim"], 0)
    if options.get("size_fn") is not None:
        size_fn = options["size_fn"]
        cuts["size_fn"] = lambda batch: size_fn(batch[0])
    if options.get("split_fn") is not None:
        split_fn = options["split_fn"]
        cuts["split_fn"] = lambda batch, begin, end: (
            split_fn(batch[0], begin, end),
            batch[1][begin:end],
        )
    return cuts
