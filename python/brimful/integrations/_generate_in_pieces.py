"""``generate`` of a model of transformers on fewer rows where memory runs out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import brimful
from brimful._process_end import is_out_of_memory
from brimful.integrations._piece_records import PieceRecords


def generate_in_pieces(model: torch.nn.Module) -> None:
    """``model.generate`` goes on in pieces of its rows, with a cache of their own, when memory runs out.

    Without sampling the result is the same. Once it ran out, later calls begin with pieces. Stopping criteria that
    keep a state for each row of a batch do not fit its pieces.
    """
    whole: Any = getattr(model, "generate", None)
    if callable(whole) and not hasattr(whole, "_whole"):
        model.generate = of_rows(whole)  # type: ignore[assignment]


def of_rows(whole: Callable[..., Any], padding: int | None = None) -> Callable[..., Any]:
    """The same function in pieces of its rows, where memory runs out. ``padding`` fills rows that end before others."""
    ran_out = False

    @functools.wraps(whole)
    def generate(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran_out
        if not ran_out:
            try:
                return whole(*args, **kwargs)
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                ran_out = True
        return _in_pieces(whole, args, kwargs, padding)

    generate._whole = whole  # type: ignore[attr-defined]
    return generate


def _in_pieces(
    whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], padding: int | None
) -> Any:
    rows = _rows(args, kwargs)
    if kwargs.get("past_key_values") is not None:
        raise ValueError(
            "memory ran out, and a cache that is given is not cut into rows (past_key_values: "
            f"{type(kwargs['past_key_values']).__name__}); leave it out, or call generate with fewer rows"
        )
    records: PieceRecords[torch.Tensor] = PieceRecords()

    def split(batch: Any, begin: int, end: int) -> Any:
        (args, kwargs), where = batch
        positional = tuple(_cut(value, rows, begin, end) for value in args)
        named = {name: _cut(value, rows, begin, end) for name, value in kwargs.items()}
        return (positional, named), where[begin:end]

    def fn(piece: Any) -> torch.Tensor:
        (args, kwargs), where = piece
        tokens = whole(*args, **kwargs)
        if not isinstance(tokens, torch.Tensor):
            raise ValueError(
                "memory ran out, and only tokens of pieces can be joined (result: "
                f"{type(tokens).__name__}); leave out return_dict_in_generate"
            )
        records.note(where, tokens)
        rows_done: torch.Tensor = where
        return rows_done

    brimful.map_batches(
        fn,
        ((args, kwargs), torch.arange(rows, device="cpu")),
        pieces=2,
        size_fn=lambda batch: len(batch[1]),
        split_fn=split,
    )
    parts = records.standing()
    longest = max(part.shape[1] for part in parts)
    padding = _padding(whole, kwargs) if padding is None else padding
    pad = torch.nn.functional.pad
    return torch.cat([pad(p, (0, longest - p.shape[1]), value=padding) for p in parts])


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    named = [kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds", "context")]
    for value in (*args[:1], *named):
        if isinstance(value, torch.Tensor):
            return len(value)
    raise ValueError(
        "memory ran out, and generate has no inputs that are cut into rows (expected one of: "
        "inputs, input_ids, inputs_embeds); pass one of them"
    )


def _cut(value: Any, rows: int, begin: int, end: int) -> Any:
    is_of_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows
    return value[begin:end] if is_of_rows else value


def _padding(whole: Any, kwargs: dict[str, Any]) -> int:
    """What generate fills a row with that has ended before others."""
    own = getattr(getattr(whole, "__self__", None), "generation_config", None)
    sources = [kwargs.get("generation_config"), own]
    for name in ("pad_token_id", "eos_token_id"):
        for value in (kwargs.get(name), *(getattr(source, name, None) for source in sources)):
            if value is not None:
                return int(value[0] if isinstance(value, (list, tuple)) else value)
    return 0
