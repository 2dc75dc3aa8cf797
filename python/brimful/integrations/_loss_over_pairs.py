"""A loss of sentence-transformers that compares the rows of a batch, as a function of the embeddings of all rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

import brimful
from brimful import _C
from brimful._process_end import is_out_of_memory
from brimful.integrations._guide import Guide
from brimful.sizer._trim_check import _tolerance, _undisturbed

_OF_LAYERS = ("AdaptiveLayerLoss", "Matryoshka2dLoss")  # they look into the model
_ROWS_CHECKED = 4
_REMEDY = (
    "take a loss of sentence-transformers that compares sentence embeddings alone, such as "
    "MultipleNegativesRankingLoss; or train without BrimfulCallback; or pass rows_are_independent=True if no row's "
    "loss depends on the others"
)


class LossOverPairs:
    """A trainer's loss in steps over pairs. Raises ``ValueError`` for no function of the embeddings alone."""

    def __init__(self, trainer: Any, loss: torch.nn.Module) -> None:
        self._trainer, self._loss = trainer, loss
        self._guide = Guide.of(loss)
        self._in_parts = _that_calculates(loss)
        self._is_checked = False
        self._names: list[str] = []
        processes = trainer.accelerator.num_processes
        gathers = bool(_gathering(loss))
        #: Each rank has a loss of its own rows, and the trainer's is their mean.
        self._own = processes > 1 and not gathers
        self._require_whole_batch(processes > 1 and gathers)

    def embed(self, model: Any, piece: tuple[Mapping[str, Any], torch.Tensor]) -> dict[str, Any]:
        inputs, where = piece
        features, label = self._features(inputs)
        if not (self._is_checked or torch.is_grad_enabled() or len(where) < 2):
            self._check(model, features, label, len(where))
            self._is_checked = True
        return self._embedded(model, features, label, int(where[0]))

    def evaluate(self, model: Any, batch: Any, cuts: Mapping[str, Any]) -> Any:
        """The loss of a batch that is embedded in pieces, without gradients."""
        structure: Any = None

        def embed(piece: Any) -> list[torch.Tensor]:
            nonlocal structure
            towers, structure = pytree.tree_flatten(self.embed(model, piece))
            return towers

        towers = brimful.map_batches(embed, batch, pieces=2, **cuts)
        loss = self._of(pytree.tree_unflatten(towers, structure))
        if isinstance(loss, dict):
            self._trainer.track_loss_components(loss)
        return sum(pytree.tree_leaves(loss))

    def step(self, sizer: brimful.BatchSizer, batch: Any, factor: float) -> _C.Outcome:
        """``factor`` is all ranks over those that have data: the loss is the mean over the latter."""
        active = self._trainer.accelerator.num_processes / factor

        def loss(embeddings: dict[str, Any], rows: slice | None = None) -> Any:
            if rows is None:
                return self._of(embeddings)
            here = rows.stop - rows.start
            result = self._of(pytree.tree_map(lambda tensor: tensor[rows], embeddings))
            # The step's loss is the mean over rows.
            larger = len(embeddings["columns"][0]) / (here * active)
            return pytree.tree_map(lambda value: value * larger, result)

        outcome = sizer.pair_step(
            batch, self.embed, loss, own=self._own, gathered_gradient=not self._own
        )
        if self._names and outcome.losses:
            device = self._trainer.args.device
            terms = [torch.tensor(loss, device=device) for loss in outcome.losses]
            self._trainer.track_loss_components(dict(zip(self._names, terms, strict=True)))
        return outcome

    def _features(self, inputs: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
        features, label = self._trainer.collect_features(dict(inputs))
        for name in ("cu_seq_lens_q", "offsets"):
            if any(name in column for column in features):
                raise ValueError(
                    f"the batch's texts are flattened into one row, which cannot be cut (entry: {name}); "
                    + (
                        "set model[0].unpad_inputs = False"
                        if name != "offsets"
                        else "train a StaticEmbedding without BrimfulCallback"
                    )
                )
        return features, label

    def _embedded(
        self, model: Any, features: list[dict[str, Any]], label: Any, begin: int
    ) -> dict[str, Any]:
        columns = [model(dict(column))["sentence_embedding"] for column in features]
        found: dict[str, Any] = {"columns": columns}
        if label is not None:
            found["label"] = label
        if self._guide is not None:
            with self._stands_for(model):
                found["guide"] = self._guide.embeddings(features, columns, begin)
        return found

    def _of(self, embeddings: dict[str, Any]) -> Any:
        columns = embeddings["columns"]
        rest = {name: [t.detach() for t in pytree.tree_leaves(v)] for name, v in embeddings.items()}
        label, guide = next(iter(rest.get("label", ())), None), rest.get("guide", ())
        with self._stands_for(), _not_gathering(self._loss):
            if self._in_parts is None:
                result = self._loss([{"sentence_embedding": column} for column in columns], label)
            else:
                result = self._calculated(self._in_parts.calculate_loss, columns, label, guide)
        self._names = list(result) if isinstance(result, dict) else []
        return result

    def _calculated(
        self, calculate: Callable[..., Any], columns: list[Any], label: Any, guide: Any
    ) -> Any:
        arguments: list[Any] = [[[tensor] for tensor in guide]] if guide else []
        options = {} if label is None or guide else {"labels": label}

        def of(towers: Any, with_backward: bool) -> Any:
            reps = [[tower] for tower in towers]
            return calculate(reps, *arguments, **options, with_backward=with_backward)

        return _InParts.apply(of, *columns) if torch.is_grad_enabled() else of(columns, False)

    @contextlib.contextmanager
    def _stands_for(self, *models: Any) -> Iterator[None]:
        """The model returns what it is given: embeddings, in the place of texts."""
        of_trainer = (self._trainer.model, self._trainer.model_wrapped)
        with contextlib.ExitStack() as stack:
            for model in {id(model): model for model in (*of_trainer, *models)}.values():
                stack.enter_context(patch.object(model, "forward", _as_it_is))
            yield

    def _check(self, model: Any, features: list[dict[str, Any]], label: Any, rows: int) -> None:
        """A few rows, without dropout: the loss of their embeddings is what the loss returns for their texts."""
        few = [_first_rows(column, rows) for column in features]
        label = None if label is None else label[:_ROWS_CHECKED]
        with _undisturbed([model, self._loss]) as dtypes, torch.no_grad():
            embeddings = self._embedded(model, few, label, -1)
            with _not_gathering(self._loss):
                whole = _sum(self._loss([dict(column) for column in few], label))
            try:
                ours = _sum(self._of(embeddings))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise self._refused(f"it raised: {error!r}") from error
            rtol = _tolerance([model], dtypes)
        if math.isnan(ours) != math.isnan(whole) or abs(ours - whole) > rtol * max(1, abs(whole)):
            raise self._refused(f"of texts: {whole:.8g}, of their embeddings: {ours:.8g}")

    def _require_whole_batch(self, gathers: bool) -> None:
        trained = {id(p) for p in self._trainer.model.parameters()}
        other = self._guide.parameters() if self._guide is not None else set()
        if self._guide is None and any(hasattr(part, "guide") for part in self._loss.modules()):
            raise self._refused(
                "it has a guide", "take CachedGISTEmbedLoss with the same arguments"
            )
        own = (
            name
            for name, p in self._loss.named_parameters()
            if p.requires_grad and id(p) not in trained and id(p) not in other
        )
        if (name := next(own, None)) is not None:
            raise self._refused(f"its own parameter: {name}")
        if type(self._loss).__name__ in _OF_LAYERS:
            raise self._refused("it looks at the model's layers")
        if gathers and self._guide is not None:
            raise self._refused("gather_across_devices: True", "leave gather_across_devices out")
        if not type(self._trainer).compute_loss.__module__.startswith("sentence_transformers."):
            raise self._refused(f"compute_loss is of {type(self._trainer).__name__}")

    def _refused(self, why: str, remedy: str = _REMEDY) -> ValueError:
        return ValueError(
            "this loss compares the rows of a batch, and is not known to be a function of their embeddings alone "
            f"(loss: {type(self._loss).__name__}, {why}); {remedy}"
        )


class _InParts(torch.autograd.Function):
    """A Cached... loss goes through the scores in parts, each with its backward, so that they are never all there."""

    @staticmethod
    def forward(ctx: Any, calculate: Callable[..., Any], *columns: torch.Tensor) -> torch.Tensor:
        leaves = [column.detach().requires_grad_() for column in columns]
        with torch.enable_grad():
            loss = calculate(leaves, True)
        ctx.save_for_backward(*(leaf.grad for leaf in leaves))
        return loss.detach()  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, seed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(None if g is None else g * seed for g in ctx.saved_tensors)


def _that_calculates(loss: Any) -> Any:
    """The Cached... loss in it, if there is one, whose ``calculate_loss`` is of embeddings."""
    while loss is not None and not hasattr(loss, "calculate_loss"):
        loss = getattr(loss, "loss", None)
    return loss


def _gathering(loss: torch.nn.Module) -> list[Any]:
    return [module for module in loss.modules() if vars(module).get("gather_across_devices")]


@contextlib.contextmanager
def _not_gathering(loss: torch.nn.Module) -> Iterator[None]:
    """Where all ranks' embeddings are gathered before the loss, it is the same as on one rank."""
    found = _gathering(loss)
    try:
        for module in found:
            module.gather_across_devices = False
        yield
    finally:
        for module in found:
            module.gather_across_devices = True


def _first_rows(column: dict[str, Any], rows: int) -> dict[str, Any]:
    def first(value: Any) -> Any:
        of_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows
        return value[:_ROWS_CHECKED] if of_rows else value

    return {name: first(value) for name, value in column.items()}


def _sum(loss: Any) -> float:
    return float(sum(pytree.tree_leaves(loss)))


def _as_it_is(features: Any, **_: Any) -> Any:
    return features
