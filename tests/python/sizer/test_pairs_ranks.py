"""sizer.pair_step on several ranks: what is gathered, and what a failure on one of them does to the others."""

import time

import pytest
import torch
import torch.distributed as dist
from models import seed
from pair_models import (
    TwoTowers,
    clip_loss,
    embed,
    equal,
    gradients_of,
    off,
    own_clip_loss,
    pairs,
    unsplit,
)
from rank_processes import run_ranks

import brimful
from brimful import _C

NEVER = 1 << 40
ROWS = {2: [5, 8], 3: [4, 0, 7]}
FEW_ROWS = {2: [2, 3]}  # that are run again and again


def whole(size, dtype=torch.float64, rows=ROWS):
    batches = [
        pairs(count, dtype, seed=10 + rank) for rank, count in enumerate(rows[size]) if count
    ]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def batch_of(rank, dtype=torch.float64, rows=ROWS):
    rows = rows[rank.size][rank.index]
    return pairs(rows, dtype, seed=10 + rank.index) if rows else brimful.NO_DATA


def wrapped(dtype=torch.float64, **options):
    return brimful.DistributedDataParallel(TwoTowers(dtype, **options), bucket_cap_mb=0.0005)


def exact(rank, dtype, mode, wrap):
    model = TwoTowers(dtype)
    model = wrap(model)
    sizer = brimful.BatchSizer(model, pieces=2)
    loss = (own_clip_loss if mode == "own" else clip_loss)(model.module)
    value, reference = unsplit(TwoTowers(dtype), whole(rank.size, dtype))
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    for _ in range(2):
        outcome = sizer.pair_step(batch_of(rank, dtype), embed, loss, own=mode == "own")
        assert outcome.loss == pytest.approx(value, rel=1e-5)
        assert outcome.weight == sum(ROWS[rank.size])
        assert off(gradients_of(model), reference) < bound
        model.zero_grad()


def small_buckets(model):
    return brimful.DistributedDataParallel(model, bucket_cap_mb=0.0005)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["all", "own"])
@pytest.mark.parametrize("size", ROWS)
def test_unequal_rows_give_the_gradient_of_the_whole_batch(size, mode, dtype):
    run_ranks(exact, dtype, mode, small_buckets, size=size)


@pytest.mark.parametrize("mode", ["all", "own"])
def test_torchs_own_class_reduces_it_too(mode):
    run_ranks(exact, torch.float64, mode, torch.nn.parallel.DistributedDataParallel)


def without_gathered_gradient(rank):
    model = wrapped()
    brimful.BatchSizer(model).pair_step(
        batch_of(rank), embed, own_clip_loss(model.module), own=True, gathered_gradient=False
    )
    alone = TwoTowers()
    total = sum(ROWS[rank.size])
    begin = 0
    for rows in ROWS[rank.size]:
        image, text = alone(whole(rank.size))
        mine = torch.zeros(total, 1, dtype=torch.bool)
        mine[begin : begin + rows] = True
        towers = [torch.where(mine, t, t.detach()) for t in (image, text)]
        (own_clip_loss(alone)(towers, slice(begin, begin + rows)) * rows / total).backward()
        begin += rows
    assert off(gradients_of(model), gradients_of(alone)) < 1e-12


def test_negatives_without_gradient():
    run_ranks(without_gathered_gradient)


def losing(rank, where, kind):
    """Rank 1 fails once: all go on, or all raise, and then go on."""
    model = wrapped(dropout=0.3)
    sizer = brimful.BatchSizer(model, pieces=2)
    clip = clip_loss(model.module)
    state = {"embedded": 0, "fired": False, "armed": False}
    embedded_at = {"first": 2, "second": 4}

    def fire(here):
        if state["armed"] and not state["fired"] and rank.index == 1 and here == where:
            state["fired"] = True
            raise torch.OutOfMemoryError("planted") if kind == "memory" else ValueError("planted")

    def embed_fn(model, piece):
        state["embedded"] += 1
        if where in embedded_at and state["embedded"] == embedded_at[where]:
            fire(where)
        towers = model(piece)
        if where == "backward" and state["embedded"] > 2 and towers[0].requires_grad:
            towers[0].register_hook(lambda _: fire("backward"))
        return towers

    def loss(embeddings):
        fire("loss")
        return clip(embeddings)

    def step():
        state["embedded"] = 0
        return sizer.pair_step(batch_of(rank), embed_fn, loss)

    step()
    model.zero_grad()
    state["armed"] = True
    seed(7 + rank.index)
    if kind == "memory":
        outcome = step()
        first = where == "first"
        assert outcome.retries == (0 if first and rank.index == 0 else 1)
        kept = gradients_of(model)
        model.zero_grad()
        seed(7 + rank.index)
        sizer.pair_step(batch_of(rank), embed_fn, loss, split=outcome.split)
        assert equal(gradients_of(model), kept)
    else:
        with pytest.raises(ValueError if rank.index == 1 else brimful.RankFailed, match="planted"):
            step()
        assert all(p.grad is None for p in model.parameters())
    model.zero_grad()
    assert step().retries == 0


@pytest.mark.parametrize("kind", ["memory", "error"])
@pytest.mark.parametrize("where", ["first", "loss", "second", "backward"])
def test_a_failure_in_either_pass_keeps_the_ranks_together(where, kind):
    run_ranks(losing, where, kind)


def short_anywhere(rank, mode):
    """Rank 1 is refused one allocation after the other."""
    model = wrapped()
    sizer = brimful.BatchSizer(model, pieces=2)
    loss = (own_clip_loss if mode == "own" else clip_loss)(model.module)
    _, reference = unsplit(TwoTowers(), whole(rank.size, rows=FEW_ROWS))
    batch = batch_of(rank, rows=FEW_ROWS)
    ended = {"stood": 0, "repeated": 0, "raised": 0}
    index, fired = 0, True
    while fired:
        with _C._FaultAt(index if rank.index == 1 else NEVER) as fault:
            try:
                outcome = sizer.pair_step(batch, embed, loss, own=mode == "own")
            except (torch.OutOfMemoryError, brimful.RankFailed):
                assert all(p.grad is None for p in model.parameters()), index
                outcome = None
        if outcome is None:
            ended["raised"] += 1
        else:
            ended["repeated" if outcome.retries else "stood"] += 1
            assert off(gradients_of(model), reference) < 1e-12, index
        model.zero_grad()
        every = [None] * rank.size
        dist.all_gather_object(every, fault.fired)
        fired = every[1]
        index += 1 if mode == "all" else 3
        if index % 12 == 0:
            rank.progress()
    return ended


@pytest.mark.parametrize("mode", ["all", "own"])
def test_a_shortage_at_any_allocation_of_one_rank_leaves_the_gradient_exact(mode):
    other, short = run_ranks(short_anywhere, mode)
    assert sum(other.values()) == sum(short.values()) > 40
    assert short["repeated"] > 30, short
    assert short["raised"] == other["raised"] <= 2, short


def refusing(rank, step_before):
    model = wrapped()
    sizer = brimful.BatchSizer(model)
    clip = clip_loss(model.module)
    if step_before:
        sizer.pair_step(batch_of(rank), embed, clip)
        model.zero_grad()

    def fails(batch=None, embed_fn=embed, loss=clip, error=ValueError, text=".", everywhere=False):
        own = rank.index == 1 or everywhere
        with pytest.raises(error if own else brimful.RankFailed, match=text):
            sizer.pair_step(batch_of(rank) if batch is None else batch, embed_fn, loss)
        assert all(p.grad is None for p in model.parameters())

    one = rank.index == 1
    fails(batch=pairs(0) if one else None, text="the batch is empty")
    fails(embed_fn=None if one else embed, error=TypeError, text="embed_fn must be callable")
    fails(embed_fn=lambda m, p: m(p)[0][:1] if one else m(p), text="another number of rows")
    fails(
        embed_fn=lambda m, p: m(p)[:1] if one else m(p),
        loss=lambda e: sum((t @ t.T).logsumexp(1).mean() for t in e),
        error=brimful.PlanMismatch,
        text=r"embeddings differ in shape or dtype \(ranks that differ: 1\)",
        everywhere=True,
    )
    fails(
        batch=[t * float("nan") for t in batch_of(rank)] if one else None,
        text=r"embeddings are not finite, .*\(ranks: 1",
        everywhere=True,
    )
    fails(
        loss=lambda e: clip(e) * (1 + rank.index),
        text="is not the same on all ranks",
        everywhere=True,
    )
    fails(loss=lambda e: clip(e) * float("nan"), text="is not finite", everywhere=True)
    model.zero_grad()
    sizer.pair_step(batch_of(rank), embed, clip)


@pytest.mark.parametrize("step_before", [False, True])
def test_what_one_rank_is_refused_ends_the_step_of_all(step_before):
    run_ranks(refusing, step_before)


def breaking_loader(rank):
    model = wrapped()
    sizer = brimful.BatchSizer(model)

    def batches():
        yield batch_of(rank)
        yield batch_of(rank)
        if rank.index == 1:
            raise ValueError("the disk is gone")
        yield batch_of(rank)

    with pytest.raises(ValueError if rank.index == 1 else brimful.RankFailed, match="disk is gone"):
        for batch in sizer.batches(batches()):
            sizer.pair_step(batch, embed, clip_loss(model.module))
            model.zero_grad()


def test_a_loader_that_fails_between_two_steps():
    run_ranks(breaking_loader)


def broken_from_the_start(rank):
    model = wrapped()
    sizer = brimful.BatchSizer(model)

    def batches():
        if rank.index == 1:
            raise ValueError("the disk is gone")
        yield batch_of(rank)

    begun = time.monotonic()
    with pytest.raises(ValueError if rank.index == 1 else brimful.RankFailed, match="disk is gone"):
        for batch in sizer.batches(batches()):
            sizer.pair_step(batch, embed, clip_loss(model.module))
    return time.monotonic() - begun


def test_a_loader_that_fails_before_it_is_known_that_steps_are_over_pairs():
    assert max(run_ranks(broken_from_the_start)) < 8


def ending_apart(rank):
    model = wrapped()
    sizer = brimful.BatchSizer(model)
    weights = []
    for batch in sizer.batches([batch_of(rank)] * (1 + 2 * rank.index)):
        weights.append(sizer.pair_step(batch, embed, clip_loss(model.module)).weight)
        model.zero_grad()
    return weights


def test_a_rank_whose_data_has_ended_takes_part():
    assert run_ranks(ending_apart) == [[13, 8, 8]] * 2


def lockstep(rank):
    model = wrapped()
    sizer = brimful.BatchSizer(model, lockstep=True)
    with pytest.raises(ValueError, match="lockstep: true"):
        sizer.pair_step(batch_of(rank), embed, clip_loss(model.module))


def test_lockstep_is_refused():
    run_ranks(lockstep)
