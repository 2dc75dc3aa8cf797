"""Tensor parallelism, alone and under fully_shard: sizes that follow the rows, and rows that ranks share."""

import functools
import random

import pytest
import torch
import torch.distributed as dist
from rank_processes import raised
from sharded_models import Fault, Kill, Trial, gradients_of, worst
from tensor_models import Decoder, expected_of, parallel, word_loss, words_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import brimful

CLOSE = 1e-6


def trial_of(rank, batch=None, **how):
    return Trial(rank, model=parallel(**how), batch=batch or words_of(4, 0), loss=word_loss)


def failing_at(trial, places):
    """And the works that torch keeps after all of them."""
    return trial.failing_at(places, CLOSE), torch._C._distributed_c10d._get_work_registry_size()


def at_each_place(rank, how, every):
    trial = trial_of(rank, **how)
    assert worst(trial.expected, expected_of([words_of(4, 0)])) < CLOSE
    begin = random.Random(str(how)).randrange(every)
    places = [{r: at} for r in range(2) for at in range(begin, trial.places, every)]
    return *failing_at(trial, places), trial.sizer._sharded.drained


@pytest.mark.parametrize("how", [{}, {"sequence": False}, {"recompute": True}], ids=str)
def test_a_fault_at_any_operator_of_a_rank(ranks, how):
    for bad, unwaited, drained in ranks(at_each_place, how, 43):
        assert bad == []
        assert unwaited == 0  # whose results would stay
        assert drained > 0


def with_shards(rank):
    """Two shards of two halves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    batches = [words_of(4, i) for i in range(2)]
    trial = trial_of(rank, batches[rank.index // 2], mesh=mesh)
    assert worst(trial.expected, expected_of(batches)) < CLOSE
    trial.begin()
    outcome = trial.step()
    places = [{r: at} for r in range(4) for at in range(17 * r, trial.places, 151)]
    return *failing_at(trial, places), outcome.weight


def test_under_fully_shard(ranks):
    for bad, unwaited, weight in ranks(with_shards, size=4):
        assert bad == []
        assert unwaited == 0
        assert weight == 8  # the rows of each half once


def at_two_places(rank, times):
    trial = trial_of(rank)
    places = trial.at_two_places(times, 3)
    places[0][1] = places[0][0]
    return trial.failing_at(places, CLOSE)


def test_both_ranks_fail(ranks):
    assert ranks(at_two_places, 8) == [[], []]


def with_other_lengths(rank):
    trial = trial_of(rank)
    bad = []
    for tokens in (2, 6, 12):
        batch = words_of(5, tokens, tokens=tokens)
        expected = expected_of([batch])
        for at in (30, 300):
            rank.progress()
            trial.begin()
            with Fault(at if rank.index == 1 else -1):
                outcome = trial.step(batch)
            right = outcome.split == [3, 2] and worst(trial.result(), expected) < CLOSE
            bad += [(tokens, at, outcome.split)] * (not right)
    return bad, trial.sizer._sharded.drained


def test_lengths_that_no_step_had_before(ranks):
    for index, (bad, drained) in enumerate(ranks(with_other_lengths)):
        assert bad == []
        assert (drained > 0) == (index == 1)


def trained(rank, with_sizer):
    model = parallel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sizer = brimful.BatchSizer(model, optimizer) if with_sizer else None
    norms = []
    for step in range(4):
        batches = [words_of(4, 10 * step + i) for i in range(2)]
        for number, batch in enumerate(batches):
            if sizer is None:
                (word_loss(model, batch) / 2).backward()
                continue
            with Fault(200 if (step, number, rank.index) == (2, 1, 0) else -1):
                sizer.step(batch, word_loss, accumulate=number > 0)
        if with_sizer:
            for p in model.parameters():
                p.grad /= 2
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.full_tensor() for n, p in model.named_parameters()}, norms


def as_without(rank):
    plain, plain_norms = trained(rank, False)
    rank.progress()
    ours, our_norms = trained(rank, True)
    return worst(ours, plain), torch.allclose(torch.tensor(plain_norms), torch.tensor(our_norms))


def test_a_loop_trains_as_without_a_sizer(ranks):
    for distance, same_norms in ranks(as_without):
        assert distance < 1e-4
        assert same_norms


def with_parallel_loss(rank):
    with loss_parallel():
        trial = trial_of(rank, parallel_loss=True)
        assert worst(trial.expected, expected_of([words_of(4, 0)])) < CLOSE
        return failing_at(trial, [{1: 40}, {0: trial.places - 40}, {1: trial.places // 2}])


def test_a_loss_over_logits_that_are_divided(ranks):
    assert ranks(with_parallel_loss) == [([], 0)] * 2


class Selective(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        policy = functools.partial(
            create_selective_checkpoint_contexts,
            lambda _, op, *args, **kwargs: (
                CheckpointPolicy.MUST_SAVE
                if op is torch.ops.aten.mm.default
                else CheckpointPolicy.PREFER_RECOMPUTE
            ),
        )
        return checkpoint(self.part, x, use_reentrant=False, context_fn=policy)


def with_selective_checkpoints(rank):
    model = parallel()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Selective(block)
    trial = Trial(rank, model=model, batch=words_of(4, 0), loss=word_loss)
    expected = expected_of([words_of(4, 0)])
    found = {name.replace("part.", ""): g for name, g in trial.expected.items()}
    assert worst(found, expected) < CLOSE
    places = [{1: at} for at in range(50, trial.places, 150)]
    return *failing_at(trial, places), trial.sizer._sharded.drained


def test_collectives_within_a_mode(ranks):
    first, second = ranks(with_selective_checkpoints)
    assert first[:2] == second[:2] == ([], 0)
    assert second[2] > 0


def with_collectives_of_its_own(rank):
    def loss(model, piece):
        result = word_loss(model, piece)
        rows = torch.ones(len(piece[0]))
        dist.all_reduce(rows)
        dist.all_gather([torch.empty_like(rows) for _ in range(rank.size)], rows)
        dist.broadcast(rows, 0)
        dist.all_to_all_single(torch.empty(2 * len(rows)), torch.ones(2 * len(rows)))
        dist.barrier()
        return result

    trial = Trial(rank, model=parallel(), batch=words_of(4, 0), loss=loss)
    return failing_at(trial, [{1: 40}, {0: trial.places // 2}])


def test_collectives_of_the_program(ranks):
    assert ranks(with_collectives_of_its_own) == [([], 0)] * 2


def with_messages(rank):
    def loss(model, piece):
        result = word_loss(model, piece)
        rows = torch.ones(len(piece[0]))
        dist.recv(rows, 1) if rank.index == 0 else dist.send(rows, 0)
        return result

    trial = Trial(rank, model=parallel(), batch=words_of(4, 0), loss=loss)
    return trial.error_of(Fault(40 if rank.index == 1 else -1))


def test_messages_of_the_program_end_the_job_and_no_rank_waits(ranks):
    (first, _, waited), (second, text, _) = ranks(with_messages)
    assert (first, second) == ("RankFailed", "RankFailed")
    assert "the sizes of send of [2] Float are not known" in text
    assert waited < 8


def with_another_error(rank):
    model = parallel()
    sizer = brimful.BatchSizer(model)
    sizer.step(words_of(4, 0), word_loss)
    model.zero_grad()

    def step():
        with Fault(100 if rank.index == 0 else -1, ZeroDivisionError):
            sizer.step(words_of(4, 0), word_loss)

    error = raised(step)
    model.zero_grad()
    sizer.step(words_of(4, 0), word_loss)
    return type(error).__name__, worst(gradients_of(model), expected_of([words_of(4, 0)]))


def test_an_error_that_is_no_shortage(ranks):
    (first, distance), (second, other) = ranks(with_another_error)
    assert (first, second) == ("ZeroDivisionError", "RankFailed")
    assert max(distance, other) < CLOSE


def killed(rank, fails_at):
    """While the other one waits for a collective, or, if it has failed, for a size."""
    return trial_of(rank).error_of(Kill(300) if rank.index == 1 else Fault(fails_at))


@pytest.mark.parametrize("fails_at", [-1, 20])
def test_a_rank_that_is_killed(ranks, fails_at):
    (error, text, waited), _ = ranks(killed, fails_at, lost=(1,))
    assert error == "RankFailed", text
    assert waited < 8


def with_other_rows(rank):
    sizer = brimful.BatchSizer(parallel())
    error = raised(lambda: sizer.step(words_of(4 + rank.index, 0), word_loss))
    sizer.step(words_of(4, 0), word_loss)  # nothing is left of it
    return type(error).__name__, str(error)


def test_ranks_of_one_group_with_different_rows(ranks):
    for error, text in ranks(with_other_rows):
        assert error == "ValueError"
        assert "(ranks: 0, 1, weights: 4, 5)" in text


def refused(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(
        nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()}
    )
    alone = raised(lambda: brimful.BatchSizer(model))
    wrapped = raised(
        lambda: brimful.BatchSizer([model, brimful.DistributedDataParallel(nn.Linear(4, 4))])
    )
    brimful.BatchSizer(model, local=True)
    experts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(experts[0], mesh=mesh["data"])
    fully_shard(experts, mesh=init_device_mesh("cpu", (4,)))
    unlike = raised(lambda: brimful.BatchSizer(experts))
    return [(type(e).__name__, str(e)) for e in (alone, wrapped, unlike)]


def test_what_is_refused_says_what_to_do(ranks):
    for (alone, text), (wrapped, other), (unlike, last) in ranks(refused, size=4):
        assert unlike == "TypeError" and "divided over the same ranks (meshes: 2)" in last
        assert alone == "ValueError" and "fully_shard over the mesh's data-parallel" in text
        assert wrapped == "TypeError" and "divide all of them" in other


def of_two_layers(rank):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    batch = torch.randn(6, 4)

    def loss(m, piece):
        Fault.in_pieces = True
        return m(piece).square().mean()

    sizer = brimful.BatchSizer(model)
    sizer.step(batch, loss)
    model.zero_grad()
    with Fault(5 if rank.index == 1 else -1):
        outcome = sizer.step(batch, loss)
    loss(plain, batch).backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    return outcome.split, worst(gradients_of(model), expected) < CLOSE, outcome.weight


@pytest.mark.smoke
def test_two_layers(ranks):
    assert ranks(of_two_layers) == [([3, 3], True, 6)] * 2


def test_a_model_that_is_not_divided_has_no_part():
    assert brimful.BatchSizer(Decoder())._sharded is None
