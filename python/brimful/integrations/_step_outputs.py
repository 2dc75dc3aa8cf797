"""What a Lightning module's ``training_step`` returns and logs for pieces, as it would for the whole batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric

_LOG = inspect.signature(LightningModule.log)


class OfPieces(list[Any]):
    """What has no rows and is no mean, such as a count: the value of each piece, in the order in which they ran."""


class BatchSkipped(Exception):
    """``training_step`` returned ``None``."""


class _Logged(NamedTuple):
    name: str
    value: Any
    options: dict[str, Any]


class _Piece(NamedTuple):
    output: Any
    logs: list[_Logged]
    weight: float | None


class StepOutputs:
    """Of one batch at a time. What pieces left that are repeated is forgotten: see ``keepers``."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._pieces: list[_Piece] = []
        self._skipped = False
        self._synced: list[_Logged] = []
        self.keepers = ((self._begin, self._begin_again),)

    def of_piece(self, run: Callable[[], Any], weight: float | None) -> Any:
        """The loss. ``weight`` is that of the piece in means, where it is not its number of rows."""
        logs: list[_Logged] = []

        @functools.wraps(self._module.log)
        def note(*args: Any, **kwargs: Any) -> None:
            given = _LOG.bind(self._module, *args, **kwargs).arguments
            given.pop("self")
            name, value = given.pop("name"), given.pop("value")
            if isinstance(value, torch.Tensor) and not given.get("enable_graph", False):
                value = value.detach()
            logs.append(_Logged(name, value, dict(given)))

        with patch.object(self._module, "log", note):
            output = run()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._pieces.append(_Piece(_detached(output), logs, weight))
        if output is None:
            self._skipped = True
            raise BatchSkipped("training_step returned None")
        return loss

    def output(self, loss: torch.Tensor, split: Sequence[int], order: Sequence[int]) -> Any:
        """What the batch's ``training_step`` returns, with this loss. ``split`` is the rows of each piece."""
        outputs = [piece.output for piece in self._pieces]
        if not outputs or not isinstance(outputs[0], Mapping):
            return loss
        rows = list(split) if len(split) == len(outputs) else [1] * len(outputs)
        extra = [{k: v for k, v in output.items() if k != "loss"} for output in outputs]
        return {**_joined(extra, rows, self._weights(rows), order), "loss": loss}

    def log(self, split: Sequence[int]) -> None:
        """Once for the batch what its pieces have logged."""
        rows = list(split) if len(split) == len(self._pieces) else [1] * len(self._pieces)
        found: dict[tuple[str, int], list[tuple[_Logged, float]]] = {}
        for piece, weight in zip(self._pieces, self._weights(rows), strict=True):
            times: dict[str, int] = {}
            for logged in piece.logs:
                times[logged.name] = number = times.get(logged.name, 0) + 1
                found.setdefault((logged.name, number), []).append((logged, weight))
        every = [_merged(of_name) for of_name in found.values()]
        if self._pieces:
            self._synced = [logged for logged in every if logged.options.get("sync_dist")]
        else:  # without data: the other ranks meet this one in what they log, and it adds nothing
            every = [_adding_nothing(logged) for logged in self._synced]
        for logged in every:
            self._module.log(logged.name, logged.value, **logged.options)

    def _weights(self, rows: Sequence[int]) -> list[float]:
        weights = [piece.weight for piece in self._pieces]
        return [float(n) if w is None else w for n, w in zip(rows, weights, strict=True)]

    def _begin(self) -> list[tuple[Metric, dict[str, Any]]]:
        self._pieces, self._skipped = [], False
        return [(metric, _state_of(metric)) for metric in self._metrics]

    def _begin_again(self, states: list[tuple[Metric, dict[str, Any]]]) -> None:
        if self._skipped:  # a batch that is left out has been seen
            return
        self._pieces = []
        for metric, state in states:
            for name, value in state.items():
                setattr(metric, name, _copied(value))


def _state_of(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return {name: _copied(getattr(metric, name)) for name in names if hasattr(metric, name)}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_detached(entry) for entry in value)
    return value


def _joined(
    values: list[Any], rows: Sequence[int], weights: Sequence[float], order: Sequence[int]
) -> Any:
    first = values[0]
    if len(values) == 1 and not order:
        return first
    if isinstance(first, Mapping):
        names = {name: None for value in values for name in value}
        return {
            name: _joined([value.get(name) for value in values], rows, weights, order)
            for name in names
        }
    if all(_has_rows(value, n) for value, n in zip(values, rows, strict=True)):
        return _of_rows(values, order)
    if all(_is_number(value) for value in values):
        return _mean(values, weights)
    if len(values) == 1 or all(value is None for value in values):
        return first
    return OfPieces(values)


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def _of_rows(values: list[torch.Tensor], order: Sequence[int]) -> Any:
    if len({value.shape[1:] for value in values}) > 1:
        return OfPieces(values)
    joined = torch.cat(values)
    if not order:
        return joined
    if len(order) <= max(order):  # rows without a label that counts did not run
        return OfPieces(values)
    places = torch.tensor(order, device=joined.device)
    return torch.empty_like(joined).index_copy_(0, places, joined)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dim() == 0 and value.is_floating_point()
    return isinstance(value, float)


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    counted = [(v, w) for v, w in zip(values, weights, strict=True) if w > 0]
    total = sum(weight for _, weight in counted)
    if total == 0:
        return sum(values) / len(values)
    return sum(value * (weight / total) for value, weight in counted)


def _reduction(logged: _Logged) -> str:
    reduction = logged.options.get("reduce_fx", "mean")
    return str(getattr(reduction, "__name__", reduction))


def _adding_nothing(logged: _Logged) -> _Logged:
    """To the epoch's figure; the step's counts the last value of this rank."""
    if isinstance(logged.value, Metric):
        return logged
    value = logged.value * 0 if _reduction(logged) == "sum" else logged.value
    return _Logged(logged.name, value, {**logged.options, "batch_size": 0})


def _merged(found: list[tuple[_Logged, float]]) -> _Logged:
    """By the reduction that it was logged with; a metric has all pieces in its state."""
    last, values = found[-1][0], [logged.value for logged, _ in found]
    if len(found) == 1 or isinstance(last.value, Metric):
        return last
    reduction = _reduction(last)
    options = dict(last.options)
    if reduction in ("min", "max"):
        value = functools.reduce(min if reduction == "min" else max, values)
    elif reduction == "sum":
        value = sum(values)
    else:
        weights = [weight for _, weight in found]
        if all(logged.options.get("batch_size") is not None for logged, _ in found):
            weights = [float(logged.options["batch_size"]) for logged, _ in found]
            options["batch_size"] = int(sum(weights))
        value = _mean(values, weights)
    return _Logged(last.name, value, options)
