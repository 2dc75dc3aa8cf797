"""A rank of a sharded model runs out of memory at any operator: no rank waits, and all repeat the step in pieces."""

import functools
import random
import time

import pytest
import torch
import torch.distributed as dist
from rank_processes import raised
from sharded_models import Fault, Trial, batch_of, loss_fn, reference, worst
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import brimful

CLOSE = 1e-6
CONFIGURATIONS = {
    "plain": {},
    "kept": {"reshard": False},
    "recomputed": {"recompute": True},
    "prefetched": {"prefetch": True},
}


def at_each_place(rank, how, every):
    trial = Trial(rank, **how)
    assert trial.sizer._sharded.collectives > 10
    assert worst(trial.expected, reference((4, 4), (0, 1))) < CLOSE
    begin = random.Random(str(how)).randrange(every)
    places = [{failing: at} for failing in range(2) for at in range(begin, trial.places, every)]
    return trial.failing_at(places, CLOSE), trial.sizer._sharded.drained, trial.places


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_fault_at_any_operator_of_a_rank(ranks, name):
    results = ranks(at_each_place, CONFIGURATIONS[name], 23)
    for bad, drained, places in results:
        assert bad == []
        assert drained > 0 and places > 200


def at_two_places(rank, times):
    trial = Trial(rank)
    return trial.failing_at(trial.at_two_places(times, 5), CLOSE)


def test_two_ranks_fail_at_different_places_of_one_step(ranks):
    assert ranks(at_two_places, 12) == [[], []]


def with_groups_of_replicas(rank):
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    trial = Trial(rank, rows=(4, 4, 4, 4), mesh=mesh)
    assert worst(trial.expected, reference((4,) * 4, range(4))) < CLOSE
    places = [{failing: at} for failing in range(4) for at in range(failing * 7, trial.places, 97)]
    return trial.failing_at(places, CLOSE)


def test_shards_with_replicas(ranks):
    assert ranks(with_groups_of_replicas, size=4) == [[]] * 4


def in_half(rank):
    trial = Trial(rank, half=True)
    bad = []
    for at in range(rank.size, trial.places, 41):
        rank.progress()
        trial.begin()
        with Fault(at if rank.index == 1 else -1):
            trial.step()
        # in bfloat16 pieces are rounded otherwise than the whole
        bad += [at] * (worst(trial.result(), trial.expected) > 2e-2)
    return bad


def test_mixed_precision(ranks):
    assert ranks(in_half) == [[], []]


def added_to(rank):
    trial = Trial(rank)
    bad = []
    for at in range(11, trial.places, 61):
        rank.progress()
        trial.begin()
        trial.step()
        with Fault(at if rank.index == 0 else -1):
            trial.step(accumulate=True)
        twice = {name: 2 * g for name, g in trial.expected.items()}
        bad += [at] * (worst(trial.result(), twice) > CLOSE)
    return bad


def test_gradients_of_earlier_steps_are_kept(ranks):
    assert ranks(added_to) == [[], []]


def with_uneven_rows(rank):
    trial = Trial(rank, rows=(6, 1))
    figures = [worst(trial.expected, reference((6, 1), (0, 1)))]
    trial.begin()
    with Fault(100 if rank.index == 0 else -1):  # then rank 1 has a row for two pieces
        outcome = trial.step()
    figures.append(worst(trial.result(), trial.expected))
    return figures, outcome.split, float(trial.model.seen)


def test_a_rank_with_fewer_rows_than_pieces(ranks):
    (first, split, _), (second, other, _) = ranks(with_uneven_rows)
    assert max(first + second) < CLOSE
    assert (split, other) == ([3, 3], [1, 0])


def until_data_end(rank):
    trial = Trial(rank)
    trial.begin()
    batches = [batch_of(4, 10 + i) for i in range(3 if rank.index == 0 else 1)]
    distances = []
    for i, batch in enumerate(trial.sizer.batches(batches)):
        with Fault(90 if rank.index == 0 and i == 2 else -1):
            trial.sizer.step(batch, loss_fn)
        expected = reference((4, 4), (10, 10)) if i == 0 else reference((4,), (10 + i,))
        distances.append(worst(trial.result(), expected))
        trial.model.zero_grad()
    return distances


def test_a_rank_whose_data_have_ended(ranks):
    for distances in ranks(until_data_end):
        assert len(distances) == 3
        assert max(distances) < CLOSE


def with_an_error(rank, at):
    trial = Trial(rank)
    trial.begin()
    fault = functools.partial(Fault, error=ValueError)

    def failing():
        with fault(at if rank.index == 1 else -1):
            trial.step()

    error = raised(failing)
    trial.begin()
    trial.step()  # and all go on
    return type(error).__name__, str(error), worst(trial.result(), trial.expected)


@pytest.mark.parametrize("at", [3, 120, 230])
def test_any_other_error_is_that_of_all_ranks(ranks, at):
    (healthy, text, good), (failed, own, fine) = ranks(with_an_error, at)
    assert (healthy, failed) == ("RankFailed", "ValueError")
    assert "rank 1" in text and "planted" in text
    assert own.startswith("planted")
    assert max(good, fine) < CLOSE


def after_an_evaluation(rank, reshard):
    trial = Trial(rank, reshard=reshard)
    bad = []
    for at in (20, 100, 160):
        trial.begin()
        trial.model.eval()
        with torch.no_grad():
            trial.model(trial.batch[0])
        trial.model.train()
        with Fault(at if rank.index == 1 else -1):
            outcome = trial.step()
        if outcome.split != [2, 2] or worst(trial.result(), trial.expected) > CLOSE:
            bad.append(at)
    return bad, trial.sizer._sharded.collectives


@pytest.mark.parametrize("reshard", [True, False])
def test_an_evaluation_between_steps(ranks, reshard):
    for bad, collectives in ranks(after_an_evaluation, reshard):
        assert bad == []
        assert collectives > 10  # they are known as before


def outside_of_pieces(rank, how):
    trial = Trial(rank)
    trial.begin()
    batches = [batch_of(4, 20 + i) for i in range(3)]

    def failing():
        if how == "loader" and rank.index == 1:
            batches[1:] = [None]
        iterator = (batch if batch is not None else 1 / 0 for batch in batches)
        for i, batch in enumerate(trial.sizer.batches(iterator)):
            wrong = how == "input" and i == 1 and rank.index == 1
            trial.sizer.step(torch.tensor(3) if wrong else batch, loss_fn)
            trial.model.zero_grad()

    error = raised(failing)
    trial.model.zero_grad()
    trial.sizer.step(trial.batch, loss_fn)
    return type(error).__name__, str(error), worst(trial.result(), trial.expected)


@pytest.mark.parametrize(("how", "own"), [("loader", "ZeroDivisionError"), ("input", "TypeError")])
def test_a_rank_that_fails_outside_of_its_pieces(ranks, how, own):
    (healthy, text, good), (failed, _, fine) = ranks(outside_of_pieces, how)
    assert (healthy, failed) == ("RankFailed", own)
    assert "rank 1" in text
    assert max(good, fine) < CLOSE


def too_large(rank):
    trial = Trial(rank)
    trial.begin()

    class Always(Fault):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.tanh.default and rank.index == 0:
                raise torch.OutOfMemoryError("planted, always")
            return super().__torch_dispatch__(func, types, args, kwargs)

    def failing():
        with Always(-1):
            trial.step()

    error = raised(failing)
    trial.begin()
    trial.step()
    return type(error).__name__, worst(trial.result(), trial.expected)


def test_a_row_that_does_not_fit_fails_the_step_on_all_ranks(ranks):
    (first, good), (second, fine) = ranks(too_large)
    assert (first, second) == ("BatchTooLarge", "RankOutOfMemory")
    assert max(good, fine) < CLOSE


def without_room_to_drain(rank):
    trial = Trial(rank)
    trial.begin()

    class Never(Fault):
        """Once its rank has failed, nothing gets memory."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if rank.index == 1 and self.count > 100 and func is torch.ops.aten.zeros.default:
                raise torch.OutOfMemoryError("planted, in the drain")
            return super().__torch_dispatch__(func, types, args, kwargs)

    began = time.monotonic()

    def failing():
        with Never(100 if rank.index == 1 else -1):
            trial.step()

    error = raised(failing)
    return type(error).__name__, str(error), time.monotonic() - began


def test_a_rank_without_room_to_drain_ends_all_at_once(ranks):
    (first, _, waited), (second, text, other) = ranks(without_room_to_drain)
    assert (first, second) == ("RankFailed", "RankFailed")
    assert "could not be issued" in text and "in the drain" in text
    assert max(waited, other) < 5


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        if self.runs == 1:  # as what torch makes once
            dist.all_reduce(torch.zeros(3))
        return self.last(self.norm(self.first(x)))


def with_batch_norm(rank):
    torch.manual_seed(0)
    model = WithBatchNorm()
    for part in (model.first, model.last):
        fully_shard(part)
    fully_shard(model)
    sizer = brimful.BatchSizer(model, batch_norm="freeze")
    x = torch.randn(6 if rank.index == 0 else 4, 4)
    at = {"due": False}

    def loss(m, piece):
        result = m(piece).square().mean()
        if at["due"] and rank.index == 0:
            at["due"] = False
            raise torch.OutOfMemoryError("planted")
        return result, 2.0 * len(piece)  # weights of its own

    sizer.step(x, loss)
    known = sizer._sharded.collectives
    model.zero_grad()
    at["due"] = True
    outcome = sizer.step(x, loss)
    norm = model.norm.num_batches_tracked.item()
    return known, outcome.split, outcome.weight, norm


def test_collectives_of_a_first_run_alone_and_a_batch_norm(ranks):
    (known, split, weight, norm), (_, other, _, _) = ranks(with_batch_norm)
    assert known > 3  # learned by the later rehearsals
    assert (split, other, weight) == ([3, 3], [2, 2], 20)
    assert norm == 2


def scaled(rank):
    trial = Trial(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sizer = brimful.BatchSizer(trial.model, scaler=scaler)
    optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
    trial.begin()
    sizer.step(trial.batch, loss_fn)
    trial.model.zero_grad()
    with Fault(90 if rank.index == 1 else -1):
        sizer.step(trial.batch, loss_fn)
    scaler.unscale_(optimizer)
    distance = worst(trial.result(), trial.expected)
    scaler.step(optimizer)
    scaler.update()
    return distance


def test_a_loss_that_is_scaled(ranks):
    assert max(ranks(scaled)) < CLOSE


def compiled(rank):
    trial = Trial(rank, compiled=True)
    trial.begin()
    with Fault(20 if rank.index == 0 else -1):
        outcome = trial.step()
    return outcome.split, worst(trial.result(), trial.expected), trial.sizer._sharded.collectives


@pytest.mark.slow
def test_blocks_that_are_compiled(ranks):
    for split, distance, collectives in ranks(compiled, watchdog_s=240, timeout_s=240):
        assert split == [2, 2]
        assert distance < CLOSE
        assert collectives > 10
