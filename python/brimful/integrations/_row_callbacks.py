"""What ``generate`` calls at each token, for some rows: a constraint, logits processors, stopping criteria."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

_LISTS = ("logits_processor", "stopping_criteria")
#: Of transformers' own processors, what has an entry for each row.
_OF_ROWS = ("encoder_input_ids", "generated_ngrams", "prompt_ignore_length")
_REMEDY = (
    "give it a method of_rows(begin, end) that returns what these rows take in its place, or call generate with fewer "
    "rows"
)


class RowCallbacks:
    """Copied before the call, so that a piece begins with none of the state that another one has left."""

    def __init__(self, model: Any, named: dict[str, Any], rows: int) -> None:
        self._prefix = named.get("prefix_allowed_tokens_fn")
        self._rows = rows
        self._beams, self._returned = (
            int(setting(model, named, name) or 1) for name in ("num_beams", "num_return_sequences")
        )
        self._numbers = self._numbered_by(model)
        self._lists = {
            name: [self._kept(callback) for callback in named[name]]
            for name in _LISTS
            if named.get(name)
        }
        self._types = {name: type(named[name]) for name in self._lists}

    def of(self, begin: int, end: int) -> dict[str, Any]:
        """In the place of those that were given."""
        found: dict[str, Any] = {
            name: self._types[name](self._one(name, c, begin, end) for c in callbacks)
            for name, callbacks in self._lists.items()
        }
        if self._prefix is not None:
            found["prefix_allowed_tokens_fn"] = _shifted(self._prefix, begin * self._numbers)
        return found

    def _kept(self, callback: Any) -> Any:
        if hasattr(callback, "of_rows"):
            return callback
        if not _is_of_transformers(callback) and (name := self._entry_for_each_row(callback)):
            raise ValueError(
                "a logits processor or stopping criterion has an entry for each row "
                f"({type(callback).__name__}.{name}: {self._rows}); {_REMEDY}"
            )
        return _copied(callback)

    def _one(self, name: str, callback: Any, begin: int, end: int) -> Any:
        if hasattr(callback, "of_rows"):
            return callback.of_rows(begin, end)
        own = _copied(callback)
        if not _is_of_transformers(callback):
            return _OfEachRow(own) if name == "stopping_criteria" else own
        if hasattr(own, "_prefix_allowed_tokens_fn"):
            own._prefix_allowed_tokens_fn = _shifted(own._prefix_allowed_tokens_fn, begin)
        for entry in _OF_ROWS:
            value = getattr(own, entry, None)
            if isinstance(value, (torch.Tensor, list)) and len(value) % self._rows == 0:
                each = len(value) // self._rows
                setattr(own, entry, value[begin * each : end * each])
                if hasattr(own, "batch_size"):
                    own.batch_size = (end - begin) * each
        context = getattr(own, "unconditional_context", None)
        if context is not None:  # of guidance without a prompt: another batch of prompts
            for entry in ("input_ids", "attention_mask"):
                if context.get(entry) is not None:
                    context[entry] = context[entry][begin:end]
        return own

    def _entry_for_each_row(self, callback: Any) -> str | None:
        """The name of what has as many entries as there are rows: it is taken for one of them."""
        sizes = {self._rows, self._rows * self._beams, self._rows * self._returned} - {1}
        for name, value in _held_by(callback).items():
            sized = isinstance(value, (list, tuple, torch.Tensor)) or hasattr(value, "__array__")
            if sized and getattr(value, "ndim", 1) > 0 and len(value) in sizes:
                return name
        return None

    def _numbered_by(self, model: Any) -> int:
        """What ``prefix_allowed_tokens_fn`` counts for each row: one, or the sequences that are returned of it."""
        if self._prefix is None or self._returned == 1 or self._beams > 1:
            return 1
        config = copy.deepcopy(model.generation_config)
        config.num_beams, config.num_return_sequences = 1, self._returned
        processors = model._get_logits_processor(
            config, input_ids_seq_length=1, prefix_allowed_tokens_fn=self._prefix
        )
        by_row = any(getattr(p, "_num_beams", 1) == self._returned for p in processors)
        return 1 if by_row else self._returned


class _OfEachRow:
    """A criterion of a program, which has to say of each row whether it ends."""

    def __init__(self, criterion: Any) -> None:
        self._criterion = criterion

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> Any:
        ends = self._criterion(input_ids, scores, **options)
        one_for_all = not isinstance(ends, torch.Tensor) or ends.dim() == 0
        if one_for_all and bool(ends) and len(input_ids) > 1:
            raise ValueError(
                "memory ran out, and a stopping criterion ends all rows together, of which a piece has some "
                f"(criterion: {type(self._criterion).__name__}); return a tensor with True for each row that ends, or "
                "call generate with fewer rows"
            )
        return ends

    def __getattr__(self, name: str) -> Any:
        if name == "_criterion":  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self._criterion, name)


def _shifted(constraint: Callable[[int, Any], Any], first: int) -> Callable[[int, Any], Any]:
    return lambda row, tokens: constraint(row + first, tokens)


def _is_of_transformers(callback: Any) -> bool:
    return type(callback).__module__.split(".")[0] == "transformers"


def _held_by(callback: Any) -> dict[str, Any]:
    """What it has by name: its attributes, or what its function closes over."""
    held = dict(getattr(callback, "__dict__", {}))
    function = getattr(callback, "__func__", callback)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return held


def _copied(callback: Any) -> Any:
    """With a state of its own; models and tokenizers are shared."""
    shared: dict[int, Any] = {}
    for value in _held_by(callback).values():
        if isinstance(value, torch.nn.Module) or _is_of_transformers(value):
            shared[id(value)] = value
    try:
        return copy.deepcopy(callback, shared)
    except Exception as error:
        raise ValueError(
            "a logits processor or stopping criterion cannot be copied for each piece "
            f"({type(callback).__name__}: {error!r}); {_REMEDY}"
        ) from None


def setting(model: Any, named: dict[str, Any], name: str) -> Any:
    """Of the call, its configuration or the model's."""
    sources = (named.get("generation_config"), getattr(model, "generation_config", None))
    values = (named.get(name), *(getattr(source, name, None) for source in sources))
    return next((value for value in values if value is not None), None)
