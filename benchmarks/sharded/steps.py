"""What a step of a sharded model takes under a sizer: without a fault, with an agreement a block, and repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import common, intervals, ranks

IDS = ("sharded.idle", "sharded.composer", "sharded.retry")
STALL_S = 240.0
ROUNDS, QUICK_ROUNDS = 60, 2
WORDS, WIDTH, HEADS, BLOCKS, ROWS = 512, 256, 4, 6, 4


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the ratios of interleaved steps, both ranks' slowest."""
    conditions = {
        **common.machine_conditions(),
        "model": f"{BLOCKS} blocks of attention, width {WIDTH}, {ROWS} rows a rank, 24 to 64 tokens, new in every step",
        "ranks": "2 over gloo, 1 thread each",
    }
    rounds = QUICK_ROUNDS if quick else ROUNDS
    try:
        by_rank = ranks.run_ranks(2, _rank, rounds, stall_s=STALL_S)
    except ranks.RanksFailed as error:
        for figure_id in IDS:
            yield common.unmeasured(figure_id, str(error), conditions=conditions)
        return
    seconds = {
        way: [max(s) for s in zip(*(r[way] for r in by_rank), strict=True)] for way in by_rank[0]
    }
    medians = {way: 1e3 * intervals.median(of) for way, of in seconds.items()}
    print(f"\nsharded: medians in ms: { {way: round(ms, 2) for way, ms in medians.items()} }")
    again = intervals.median_ratio(seconds["plain again"], seconds["plain"])
    conditions.update(medians_ms=medians, plain_again=common.interval_dict(again))
    for figure_id, ours, peer in (
        (IDS[0], "sizer", "plain"),
        (IDS[1], "agreement in each block", "sizer"),
        (IDS[2], "repeated in two", "two pieces"),
    ):
        value = intervals.median_ratio(seconds[ours], seconds[peer])
        yield common.Figure(
            figure_id,
            "ratio",
            value.value,
            value.low,
            value.high,
            peer,
            rounds=rounds,
            conditions=conditions,
        )


def _rank(
    rank: int, world_size: int, progress: Callable[[], None], rounds: int
) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import brimful

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.qkv(self.first(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.second(x))))

    torch.manual_seed(0)
    blocks = [fully_shard(Block()) for _ in range(BLOCKS)]
    model = fully_shard(
        nn.Sequential(
            nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        )
    )
    generator = torch.Generator().manual_seed(rank)
    sizer = brimful.BatchSizer(model)
    due: list[int] = []
    splits: list[list[int]] = []

    def loss_fn(m: Any, words: torch.Tensor) -> torch.Tensor:
        logits = m(words[:, :-1])
        if due and len(words) == due[0] and rank == 1:
            due.clear()
            raise torch.OutOfMemoryError("planted, behind the forward")
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    def plain(batch: torch.Tensor) -> None:
        loss_fn(model, batch).backward()

    def in_two(batch: torch.Tensor) -> None:
        for piece in batch.chunk(2):
            (loss_fn(model, piece) / 2).backward()

    def ask(*_: object) -> None:
        dist.all_reduce(torch.zeros(1))

    def asked(batch: torch.Tensor) -> None:
        hooks = [b.register_forward_pre_hook(ask) for b in blocks]
        hooks += [b.register_full_backward_pre_hook(ask) for b in blocks]
        plain(batch)
        for hook in hooks:
            hook.remove()

    def with_sizer(batch: torch.Tensor) -> None:
        splits.append(sizer.step(batch, loss_fn).split)

    sizer.step(torch.randint(WORDS, (ROWS, 33), generator=generator), loss_fn)
    whole = sizer.state_dict()

    def repeated(batch: torch.Tensor) -> None:
        due.append(len(batch))
        with_sizer(batch)

    ways: dict[str, Callable[[torch.Tensor], None]] = {
        "plain": plain,
        "sizer": with_sizer,
        "agreement in each block": asked,
        "two pieces": in_two,
        "repeated in two": repeated,
        "plain again": plain,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    lengths = torch.Generator().manual_seed(0)
    for number in range(-3, rounds):
        length = int(torch.randint(24, 65, (), generator=lengths))
        batch = torch.randint(WORDS, (ROWS, length), generator=generator)
        shift = number % len(ways)
        for way in (list(ways) * 2)[shift : shift + len(ways)]:
            progress()
            model.zero_grad()
            sizer.load_state_dict(whole)
            if splits and splits[-1] != [ROWS]:  # that many pieces are agreed on for the next step
                with_sizer(batch)
                model.zero_grad()
                sizer.load_state_dict(whole)
            dist.barrier()
            began = time.perf_counter()
            ways[way](batch)
            if number >= 0:
                seconds[way].append(time.perf_counter() - began)
    return seconds
