"""The second model of a loss that lets it choose the negatives: its embeddings are constants beside the first one's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Guide:
    """Of a ``CachedGISTEmbedLoss``, which runs it only where there is no graph."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._kept: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def of(cls, loss: torch.nn.Module) -> Guide | None:
        cached = (
            m for m in loss.modules() if hasattr(m, "guide") and hasattr(m, "embed_minibatch")
        )
        found = next(cached, None)
        return None if found is None else cls(found)

    def parameters(self) -> set[int]:
        return {id(parameter) for parameter in self._loss.guide.parameters()}

    def embeddings(
        self, features: Sequence[dict[str, Any]], columns: Sequence[torch.Tensor], begin: int
    ) -> list[torch.Tensor]:
        """Of a piece; the second time, with a graph, what the first time gave. The loss's model returns its input."""
        if torch.is_grad_enabled() and begin in self._kept:
            return self._kept.pop(begin)
        if begin == 0:
            self._kept.clear()
        found = []
        for column, embedding in zip(features, columns, strict=True):
            given = {**column, "sentence_embedding": embedding.detach()}
            found.append(self._loss.embed_minibatch(given, 0, len(embedding), False, False)[1])
        if begin >= 0:
            self._kept[begin] = found
        return found
