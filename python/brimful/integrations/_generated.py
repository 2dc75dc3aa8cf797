"""What ``generate`` returned for pieces of a batch, as what it would have returned for the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Part = tuple[int, int, Any]  # first row, rows, result
_CACHES = ("past_key_values", "cache", "cache_params")


class Padding:
    """What fills a row that has ended before others."""

    def __init__(self, model: Any, named: Mapping[str, Any], value: int | None) -> None:
        self._sources = [
            named,
            vars(named["generation_config"]) if named.get("generation_config") is not None else {},
            vars(getattr(model, "generation_config", None) or object.__new__(_Nothing)),
        ]
        self.beams = int(self._setting("num_beams") or 1)
        pad, end = self._token("pad_token_id"), self._token("eos_token_id")
        if self.beams > 1 and value is None:  # a beam search takes a 0 for none
            value = -1 if end is None else pad or end
        self.value = next((v for v in (value, pad, end) if v is not None), 0)

    def _setting(self, name: str) -> Any:
        return next((s[name] for s in self._sources if s.get(name) is not None), None)

    def _token(self, name: str) -> int | None:
        value = self._setting(name)
        if isinstance(value, torch.Tensor):
            value = value.flatten().tolist()
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None
        return None if value is None else int(value)


class _Nothing:
    pass


def joined(parts: list[Part], padding: Padding) -> Any:
    first = parts[0][2]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return _joined_tensors("result", [result for *_, result in parts], padding.value)
    if not isinstance(first, Mapping):
        raise ValueError(
            "memory ran out, and only tokens of pieces, and dicts of them, can be joined (result: "
            f"{type(first).__name__}); call generate with fewer rows"
        )
    entries = {name: _joined_entry(name, parts, padding) for name in first}
    return type(first)(**entries) if type(first) is not dict else entries


def _joined_entry(name: str, parts: list[Part], padding: Padding) -> Any:
    values = [result[name] for *_, result in parts]
    if all(value is None for value in values) or name in _CACHES:
        return None
    if name == "segments":  # of Whisper, by row
        return [segments for value in values for segments in value]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError(
            f"memory ran out, and it is not known how what pieces returned is joined (entry: {name}, type: "
            f"{type(values[0]).__name__}); leave it out, or call generate with fewer rows"
        )
    if name == "beam_indices":  # numbers of rows that are expanded to beams
        moved = [
            torch.where(v >= 0, v + begin * padding.beams, v)
            for (begin, *_), v in zip(parts, values, strict=True)
        ]
        return _joined_tensors(name, moved, -1)
    if name == "token_timestamps":
        longest = max(value.shape[1] for value in values)
        return torch.cat([_stretched(value, longest) for value in values])
    return _joined_tensors(name, values, padding.value)


def _joined_tensors(name: str, values: list[torch.Tensor], fill: int) -> torch.Tensor:
    if len({value.shape[1:] for value in values}) == 1:
        return torch.cat(values)
    if any(
        value.dim() != 2 or (value.numel() > 0 and value.is_floating_point()) for value in values
    ):
        raise ValueError(
            "memory ran out, and what pieces generated has other lengths, and is no rows of tokens "
            f"({name}: {[tuple(value.shape) for value in values]}); call generate with fewer rows"
        )
    longest = max(value.shape[1] for value in values)
    dtype = next(value.dtype for value in values if value.shape[1] == longest)
    pad = torch.nn.functional.pad
    return torch.cat([pad(v.to(dtype), (0, longest - v.shape[1]), value=fill) for v in values])


def _stretched(times: torch.Tensor, longest: int) -> torch.Tensor:
    """The last time again."""
    missing = longest - times.shape[1]
    last = times[:, -1:] if times.shape[1] > 0 else times.new_zeros(len(times), 1)
    return torch.cat([times, last.expand(-1, missing)], 1)
