"""The arguments of a call of ``generate``: what has rows is cut, what rows share is not, and the rest is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from brimful.integrations._row_callbacks import RowCallbacks, setting

#: Where the rows are counted, besides the model's ``main_input_name``.
_INPUTS = ("inputs", "input_ids", "context", "inputs_embeds")
_OTHER_INPUTS = ("input_features", "pixel_values", "input_values", "encoder_outputs")
#: Of all rows, whatever their length.
_SHARED = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_position",
    "eos_token_id",
    "force_words_ids",
    "forced_decoder_ids",
    "logits_to_keep",
    "pad_token_id",
    "prompt_ids",
    "stop",
    "stop_strings",
    "suppress_tokens",
    "temperature",
}
#: Lists with an entry for each row, where they have that many.
_LISTS_OF_ROWS = {"decoder_start_token_id", "language", "num_frames", "task"}
#: The parameters of transformers' ``generate``.
_IN_ORDER = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
)
_CACHES = ("past_key_values", "cache", "cache_params")
#: What rows have at each token: one that has ended goes on until the last of its batch, so that pieces have less.
_AT_EACH_TOKEN = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def flattened(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """By name, those of the function's ``**kwargs`` too. A call that does not fit the signature raises, as it would."""
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
        elif (
            parameter.kind is inspect.Parameter.VAR_POSITIONAL
        ):  # one that hands on, such as PEFT's
            named.update(zip(_IN_ORDER, named.pop(name, ()), strict=False))
    return named


class GenerateInputs:
    """Of one call. ``refusal`` is the error that a call raises which has to be cut and cannot be."""

    def __init__(self, model: Any, named: dict[str, Any]) -> None:
        self.rows = 0
        self.refusal: ValueError | None = None
        self._named = named
        try:
            self.rows = _rows(model, named)
            self._refuse_whole_calls(model)
            self._callbacks = RowCallbacks(model, named, self.rows)
            self.piece(0, self.rows)
        except ValueError as error:
            self.refusal = ValueError(f"memory ran out, and {error}")

    def piece(self, begin: int, end: int) -> dict[str, Any]:
        """What these rows are called with."""
        cut = {name: self._cut(name, v, begin, end) for name, v in self._named.items()}
        return cut | self._callbacks.of(begin, end)

    def _refuse_whole_calls(self, model: Any) -> None:
        named = self._named
        if setting(model, named, "return_dict_in_generate"):
            for name in _AT_EACH_TOKEN:
                if setting(model, named, name):
                    raise ValueError(
                        "what rows have at each token cannot be joined, since a row that has ended goes on until the "
                        f"last of its piece ({name}: True); leave it out, or call generate with fewer rows"
                    )
        for name in _CACHES:
            if named.get(name) is not None:
                raise ValueError(
                    f"a cache that is given is not cut into rows ({name}: {type(named[name]).__name__}); "
                    "leave it out, or call generate with fewer rows"
                )
        for name, what in (
            ("streamer", "a streamer gets the tokens of all rows together"),
            ("monitor_progress", "it is called with the progress of all rows together"),
        ):
            if named.get(name) is not None:
                raise ValueError(
                    f"{what} ({name}: {type(named[name]).__name__}); leave it out, or call generate with fewer rows"
                )
        if named.get("synced_gpus"):
            raise ValueError(
                "ranks that hold parts of the model generate in step, so that none can call it once more than the "
                "others (synced_gpus: True); call generate with fewer rows on all ranks"
            )

    def _cut(self, name: str, value: Any, begin: int, end: int) -> Any:
        if name in _SHARED:
            return value
        if isinstance(value, torch.Tensor):
            return self._cut_tensor(name, value, begin, end)
        if isinstance(value, Mapping):
            entries = {key: self._cut(f"{name}.{key}", v, begin, end) for key, v in value.items()}
            return type(value)(**entries) if type(value) is not dict else entries
        if isinstance(value, tuple):
            return tuple(self._cut(name, entry, begin, end) for entry in value)
        if isinstance(value, list):
            has_tensors = any(isinstance(entry, torch.Tensor) for entry in value)
            if len(value) == self.rows and (has_tensors or name in _LISTS_OF_ROWS):
                return value[begin:end]
            if has_tensors:
                raise _unknown(name, len(value), self.rows)
        return value

    def _cut_tensor(self, name: str, value: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        if name == "position_ids" and value.dim() == 3:  # a plane for time, height and width each
            return value[:, begin:end]
        if value.dim() > 0 and len(value) == self.rows:
            return value[begin:end]
        if value.dim() < 2 or len(value) == 1:
            return value
        raise _unknown(name, tuple(value.shape), self.rows)


def _unknown(name: str, has: Any, rows: int) -> ValueError:
    return ValueError(
        f"an entry has no row for each row of the batch, and it is not known how it is cut ({name}: {has}, rows: "
        f"{rows}); call generate with fewer rows"
    )


def _rows(model: Any, named: Mapping[str, Any]) -> int:
    main = getattr(model, "main_input_name", None)
    names = [*_INPUTS, *([main] if isinstance(main, str) else []), *_OTHER_INPUTS]
    for name in names:
        value = named.get(name)
        if isinstance(value, Mapping):
            value = next(iter(value.values()), None)
        elif isinstance(value, tuple) and value:
            value = value[0]
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return len(value)
    raise ValueError(
        "generate has no inputs that are cut into rows (expected one of: "
        f"{', '.join(dict.fromkeys(names))}); pass one of them as a tensor"
    )
