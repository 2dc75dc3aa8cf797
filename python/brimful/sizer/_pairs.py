"""Between embeddings of any structure, as a program has them, and the lists of tensors that the core takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Pairs:
    """`embed_fn` and `pair_loss` of one step, as the core calls them."""

    def __init__(
        self, embed_fn: Callable[[Any, Any], Any], pair_loss: Callable[..., Any], own: bool
    ) -> None:
        self._embed_fn = embed_fn
        self._pair_loss = pair_loss
        self._own = own
        self._structure: pytree.TreeSpec | None = None

    def embed(self, model: Any, piece: Any) -> list[torch.Tensor]:
        towers, self._structure = pytree.tree_flatten(self._embed_fn(model, piece))
        _require_tensors(
            towers, "embed_fn", "a tensor, or a tuple or dict of tensors, with a row for each row"
        )
        return towers

    def loss(self, towers: list[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
        embeddings = pytree.tree_unflatten(towers, self._structure)  # type: ignore[arg-type]
        rows = (slice(begin, end),) if self._own else ()
        losses = pytree.tree_leaves(self._pair_loss(embeddings, *rows))
        _require_tensors(losses, "pair_loss", "a scalar, or a tuple or dict of them")
        return losses


def _require_tensors(returned: list[Any], of: str, what: str) -> None:
    for value in returned or [None]:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{of} returned something else than tensors (type: {type(value)}); return {what}"
            )


def check(embed_fn: Any, pair_loss: Any, own: bool, gathered_gradient: bool) -> None:
    """Raise for arguments that are of no use."""
    for name, function in (("embed_fn", embed_fn), ("pair_loss", pair_loss)):
        if not callable(function):
            raise TypeError(f"{name} must be callable (type: {type(function)})")
    if not gathered_gradient and not own:
        raise ValueError(
            "gathered_gradient=False is only for a loss over the rank's own rows (gathered_gradient: False, own: "
            "False); leave gathered_gradient out, or pass own=True"
        )
