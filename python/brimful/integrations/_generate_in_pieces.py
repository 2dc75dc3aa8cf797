"""``generate`` of a model of transformers on fewer rows where memory runs out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

import brimful
from brimful._process_end import is_out_of_memory
from brimful.integrations._generate_inputs import GenerateInputs, flattened
from brimful.integrations._generated import Padding, joined
from brimful.integrations._piece_records import PieceRecords


def generate_in_pieces(model: torch.nn.Module) -> None:
    """``model.generate`` goes on in pieces of its rows, with a cache of their own, when memory runs out.

    Without sampling the result is the same. Once it ran out, later calls begin with pieces. Any model with a
    ``generate``: its ``main_input_name`` has the rows where there are no tokens, such as Whisper's ``input_features``.

    ``prefix_allowed_tokens_fn`` gets the rows' numbers in the batch. Logits processors and stopping criteria run as
    copies, one for each piece, so that a state that they keep begins anew; one that has a method
    ``of_rows(begin, end)`` is asked for what goes in its place. ``ValueError`` says what does not fit pieces: entries
    that have no row for each row, processors that keep one for each, a cache that is given, a streamer, scores in the
    result. A result that is a dict has no cache.
    """
    whole: Any = getattr(model, "generate", None)
    if callable(whole) and not hasattr(whole, "_whole"):
        model.generate = of_rows(whole)  # type: ignore[assignment]


def of_rows(whole: Callable[..., Any], padding: int | None = None) -> Callable[..., Any]:
    """The same function in pieces of its rows, where memory runs out. ``padding`` fills rows that end before others."""
    ran_out = False
    signature = inspect.signature(whole)

    @functools.wraps(whole)
    def generate(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran_out
        model = getattr(whole, "__self__", None)
        named = flattened(signature, args, kwargs)
        inputs = GenerateInputs(model, named)
        if not ran_out or inputs.refusal is not None:
            try:
                return whole(*args, **kwargs)
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                ran_out = True
        if inputs.refusal is not None:
            raise inputs.refusal
        return _in_pieces(whole, inputs, Padding(model, named, padding))

    generate._whole = whole  # type: ignore[attr-defined]
    return generate


def _in_pieces(whole: Callable[..., Any], inputs: GenerateInputs, padding: Padding) -> Any:
    records: PieceRecords[Any] = PieceRecords()

    def fn(piece: tuple[dict[str, Any], torch.Tensor]) -> torch.Tensor:
        named, where = piece
        records.note(where, whole(**named))
        return where

    def split(batch: Any, begin: int, end: int) -> Any:
        return inputs.piece(begin, end), batch[1][begin:end]

    brimful.map_batches(
        fn,
        (inputs, torch.arange(inputs.rows, device="cpu")),
        pieces=2,
        size_fn=lambda batch: len(batch[1]),
        split_fn=split,
    )
    return joined(records.standing_rows(), padding)
