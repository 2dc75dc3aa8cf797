"""Ways to run a contrastive batch: whole, as `pair_step` does, and as others do."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import brimful

TOKENS, WIDTH, EMBEDDING = 128, 128, 64
Batch = tuple[torch.Tensor, torch.Tensor]


class Encoder(nn.Module):
    """One tower for both texts of a pair, as sentence-transformers has it: mean of an encoder's tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(1000, WIDTH)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
                for _ in range(2)
            )
        )
        self.head = nn.Linear(WIDTH, EMBEDDING)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.words(tokens)).mean(1))
        return out


class AsSentenceTransformer(nn.Sequential):
    """What sentence-transformers' losses ask of their model."""

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": self[0](features["input_ids"])}


def draw(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    one, other = (torch.randint(0, 1000, (rows, TOKENS), generator=generator) for _ in range(2))
    return one, other


def embed(model: nn.Module, batch: Batch) -> Batch:
    return model(batch[0]), model(batch[1])


def loss(embeddings: Batch) -> torch.Tensor:
    """Of MultipleNegativesRankingLoss: each row's match against all others, at a scale of 20."""
    one, other = (F.normalize(e, dim=-1) for e in embeddings)
    return F.cross_entropy(one @ other.T * 20, torch.arange(len(one)))


def whole(model: Encoder, batch: Batch, _: int) -> None:
    loss(embed(model, batch)).backward()


def open_clip(model: Encoder, batch: Batch, rows: int) -> None:
    """As open_clip's --accum-freq: each piece again, its embeddings in their place among all, and the loss of all."""
    pieces = list(zip(*(part.split(rows) for part in batch), strict=True))
    with torch.no_grad():
        cached = [embed(model, piece) for piece in pieces]
    for j, piece in enumerate(pieces):
        fresh = [*cached[:j], embed(model, piece), *cached[j + 1 :]]
        one, other = (torch.cat(part) for part in zip(*fresh, strict=True))
        loss((one, other)).backward()


def pair_step(model: Encoder) -> Callable[..., None]:
    sizer = brimful.BatchSizer(model)

    def run(model: Encoder, batch: Batch, rows: int) -> None:
        sizer.pair_step(batch, embed, loss, split=[rows] * (len(batch[0]) // rows))

    return run


def sentence_transformers(model: Encoder) -> Callable[..., None] | None:
    """Its CachedMultipleNegativesRankingLoss; None where it is not installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return None
    losses: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    theirs = AsSentenceTransformer(model)  # takes one text of the pairs at a time: as many texts

    def run(_: Encoder, batch: Batch, rows: int) -> None:
        made = losses.CachedMultipleNegativesRankingLoss(theirs, scale=20, mini_batch_size=2 * rows)
        made([{"input_ids": part} for part in batch], torch.empty(0)).backward()

    return run
