"""Rows of unequal length under a limit: tokens that are computed, their speed, and the gradients."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common, intervals

DRAWN = ("uniform", "lognormal")
IDS = (
    *(f"rows.{what}_{how}" for how in DRAWN for what in ("tokens", "speed")),
    "rows.speed_budget",
    "rows.exact_bad",
)
SHARE = 0.3  # of what a padded batch takes
WORDS = 256
ROUNDS, QUICK_ROUNDS = 12, 2
LEARNT = 6  # steps in which the sizer learns what pieces cost
SINGLE, DOUBLE = 1e-5, 1e-12
Batch = dict[str, torch.Tensor]


class Decoder(torch.nn.Module):
    """A causal language model without dropout."""

    def __init__(self, size: int = 64, layers: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, size, dtype=dtype)
        self.places = torch.nn.Embedding(1024, size, dtype=dtype)
        self.mix = torch.nn.ModuleList(
            torch.nn.Linear(size, 3 * size, dtype=dtype) for _ in range(layers)
        )
        self.wide = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(size, 4 * size, dtype=dtype),
                torch.nn.GELU(),
                torch.nn.Linear(4 * size, size, dtype=dtype),
            )
            for _ in range(layers)
        )
        self.scores = torch.nn.Linear(size, WORDS, dtype=dtype)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        length = input_ids.size(1)
        x = self.words(input_ids) + self.places((attention_mask.cumsum(1) - 1).clamp(min=0))
        seen = torch.ones(length, length, dtype=torch.bool).tril() & (
            attention_mask[:, None, None] != 0
        )
        seen |= torch.eye(length, dtype=torch.bool)
        for mix, wide in zip(self.mix, self.wide, strict=True):
            heads = [y.unflatten(-1, (4, -1)).transpose(1, 2) for y in mix(x).chunk(3, -1)]
            y = F.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(1, 2).flatten(2)
            x = x + y
            x = x + wide(F.layer_norm(x, x.shape[-1:]))
        logits = self.scores(x[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten())


def loss_fn(model: torch.nn.Module, piece: Batch) -> Any:
    return model(**piece)


def weighted_loss(model: torch.nn.Module, piece: Batch) -> Any:
    import brimful

    return model(**piece), brimful.token_weight(piece)


def lengths_of(how: str, rows: int, longest: int, seed: int) -> torch.Tensor:
    """Drawn so; one row is as long as any may be, as a loader's padding goes."""
    generator = torch.Generator().manual_seed(seed)
    if how == "uniform":
        lengths = torch.randint(longest // 32, longest + 1, (rows,), generator=generator)
    else:
        drawn = torch.empty(rows).log_normal_(0, 0.8, generator=generator) * longest / 8
        lengths = drawn.long().clamp(4, longest)
    lengths[0] = longest
    return lengths


def batch_of(lengths: torch.Tensor, seed: int = 0, left: bool = False) -> Batch:
    width = int(lengths.max())
    generator = torch.Generator().manual_seed(seed)
    columns = torch.arange(width)[None]
    mask = columns >= width - lengths[:, None] if left else columns < lengths[:, None]
    ids = torch.randint(1, WORDS, (len(lengths), width), generator=generator) * mask
    first = mask & (mask.cumsum(1) == 1)
    labels = torch.where(mask & ~first, ids, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def by_budget(model: torch.nn.Module, batch: Batch, budget: int) -> int:
    """A step as one writes it by hand: the longest first, pieces of at most so many tokens. Returns the tokens."""
    lengths = batch["attention_mask"].sum(1)
    order = torch.argsort(lengths, descending=True, stable=True)
    total = float((batch["labels"][:, 1:] != -100).sum())
    place, computed = 0, 0
    while place < len(order):
        length = int(lengths[order[place]])
        rows = order[place : place + max(budget // length, 1)]
        piece = {name: part[:, :length].index_select(0, rows) for name, part in batch.items()}
        weight = float((piece["labels"][:, 1:] != -100).sum())
        (model(**piece) * (weight / total)).backward()
        place += len(rows)
        computed += len(rows) * length
    return computed


class Case:
    """Batches of one kind, and the limit."""

    def __init__(self, brimful: Any, how: str, quick: bool) -> None:
        self.brimful, self.how = brimful, how
        self.rows, self.longest = (16, 64) if quick else (64, 512)
        self.rounds = QUICK_ROUNDS if quick else ROUNDS
        self.model = Decoder()
        self.limit = self._limit()

    def batch(self, seed: int) -> Batch:
        return batch_of(lengths_of(self.how, self.rows, self.longest, seed), seed)

    def _limit(self) -> int:
        """Of what is in use, and a share of what the padded batch takes; gradients are there in either."""
        batch = self.batch(0)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        before = self.brimful.memory.stats("cpu").used_bytes
        sizer = self.brimful.BatchSizer(self.model)
        self.model.zero_grad()
        whole = sizer.step(batch, weighted_loss).peak_bytes
        self.model.zero_grad()
        return before + int(SHARE * (whole - before))

    def timed(self, step: Callable[[Batch], Any], batch: Batch) -> tuple[float, Any]:
        self.model.zero_grad()
        self.brimful.memory.set_limit("cpu", self.limit)
        try:
            began = time.perf_counter()
            result = step(batch)
            return time.perf_counter() - began, result
        finally:
            self.brimful.memory.set_limit("cpu", None)

    def best_budget(self) -> int:
        """The fastest of those that fit, by the median of three steps each; ten a factor of two."""
        times: dict[int, float] = {}
        budget = float(self.longest)
        while budget < 2 * self.rows * self.longest:
            try:
                taken = [
                    self.timed(lambda b, n=int(budget): by_budget(self.model, b, n), self.batch(s))[
                        0
                    ]
                    for s in (1, 2, 3)
                ]
            except (RuntimeError, MemoryError):
                break
            times[int(budget)] = intervals.median(taken)
            budget *= 2**0.25
        self.model.zero_grad()
        return min(times, key=times.__getitem__)


def computed(batch: Batch, outcome: Any) -> int:
    lengths = batch["attention_mask"].sum(1)
    place, tokens = 0, 0
    for rows in outcome.split:
        tokens += rows * int(lengths[outcome.order[place]])
        place += rows
    return tokens


def _measured(brimful: Any, how: str, quick: bool) -> dict[str, Any]:
    case = Case(brimful, how, quick)
    ours = brimful.BatchSizer(case.model, by_length=True, predict=True)
    padded = brimful.BatchSizer(case.model, predict=True)
    budget = case.best_budget()
    for seed in range(LEARNT):
        case.timed(lambda b: ours.step(b, loss_fn), case.batch(100 + seed))
    for seed in range(2):
        case.timed(lambda b: padded.step(b, weighted_loss), case.batch(100 + seed))
    seen: dict[str, list[float]] = {"ours": [], "padded": [], "budget": []}
    tokens, needed, retries, pieces = 0, 0, 0, []
    for seed in range(case.rounds):
        batch = case.batch(seed)
        steps = [
            ("ours", lambda b: ours.step(b, loss_fn)),
            ("padded", lambda b: padded.step(b, weighted_loss)),
            ("budget", lambda b: by_budget(case.model, b, budget)),
        ]
        for name, step in steps[seed % 3 :] + steps[: seed % 3]:
            taken, result = case.timed(step, batch)
            seen[name].append(taken)
            if name == "ours":
                tokens += computed(batch, result)
                needed += int(batch["attention_mask"].sum())
                retries += result.retries
                pieces.append(result.pieces)
    case.model.zero_grad()
    return {
        "tokens": tokens / needed,
        "seen": seen,
        "rounds": case.rounds,
        "conditions": {
            **common.machine_conditions(),
            "rows": case.rows,
            "longest": case.longest,
            "limit_bytes": case.limit,
            "budget": budget,
            "retries": retries,
            "pieces": pieces,
        },
    }


def _ratio(figure_id: str, found: dict[str, Any], peer: str) -> common.Figure:
    """Speed of ours over the peer's."""
    interval = intervals.median_ratio(found["seen"][peer], found["seen"]["ours"])
    return common.Figure(
        figure_id,
        "ratio",
        interval.value,
        interval.low,
        interval.high,
        peer={"padded": "padded pieces", "budget": "max_tokens by hand"}[peer],
        rounds=found["rounds"],
        conditions=found["conditions"],
    )


def _off(gradients: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    squares = sum(
        float((a - b).double().square().sum()) for a, b in zip(gradients, others, strict=True)
    )
    return float((squares / sum(float(b.double().square().sum()) for b in others)) ** 0.5)


def _exact(brimful: Any, quick: bool) -> common.Figure:
    """Steps of other lengths, dtypes, sides and pieces, against the padded batch in one."""
    bad, tried, worst = 0, 0, {"float32": 0.0, "float64": 0.0}
    for dtype, most in ((torch.float32, SINGLE), (torch.float64, DOUBLE)):
        model = Decoder(32, dtype=dtype)
        for how in DRAWN:
            for left in (False, True):
                sizer = brimful.BatchSizer(model, by_length=True, pieces=4)
                for seed in range(1 if quick else 6):
                    batch = batch_of(lengths_of(how, 24, 96, seed), seed, left)
                    model.zero_grad()
                    loss_fn(model, batch).backward()
                    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                    model.zero_grad()
                    sizer.step(batch, loss_fn)
                    off = _off([p.grad for p in model.parameters() if p.grad is not None], expected)
                    name = str(dtype).removeprefix("torch.")
                    worst[name] = max(worst[name], off)
                    bad += not off <= most
                    tried += 1
    return common.Figure(
        "rows.exact_bad", "count", bad, bad, bad, rounds=tried, conditions={"worst": worst}
    )


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields figures of both distributions, the lesser speed against budgets by hand, and steps that are not exact."""
    import brimful

    against_hand = []
    for how in DRAWN:
        found = _measured(brimful, how, quick)
        tokens = found["tokens"]
        yield common.Figure(
            f"rows.tokens_{how}",
            "ratio",
            tokens,
            tokens,
            tokens,
            peer="needed tokens",
            rounds=found["rounds"],
            conditions=found["conditions"],
        )
        yield _ratio(f"rows.speed_{how}", found, "padded")
        against_hand.append(_ratio("rows.speed_budget", found, "budget"))
    yield min(against_hand, key=lambda figure: figure.value or 0)
    yield _exact(brimful, quick)
