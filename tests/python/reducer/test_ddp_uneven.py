"""Ranks with different numbers of batches: join() in a plain loop, and the sizer's loop, which needs none."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_reference import batch_of, require_same_everywhere, small_net, wrap
from models import cross_entropy, same_bits, values_of
from rank_processes import raised
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import brimful


def normed_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).double()


def train(model, rank, steps, **join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(**join):
        for step in range(steps):
            x, y = batch_of(rank, step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def join_job(rank, steps, join):
    ours, theirs = wrap(small_net()), DistributedDataParallel(small_net())
    for model in (ours, theirs):
        train(model, rank.index, steps[rank.index], **join)
    assert all(p.grad is None for p in ours.parameters())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
    require_same_everywhere(rank, values_of(ours))
    x, y = batch_of(rank.index, 9)
    F.cross_entropy(ours(x), y).backward()  # an even step behind it
    F.cross_entropy(theirs(x), y).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-12)


@pytest.mark.parametrize("join", [{}, {"divide_by_initial_world_size": False}])
@pytest.mark.parametrize("steps", [(1, 3), (3, 1), (2, 2), (0, 2), (0, 0)])
def test_join_trains_as_with_torchs_class(ranks, steps, join):
    ranks(join_job, steps, join)


def test_join_of_three_ranks_that_end_one_after_the_other(ranks):
    ranks(join_job, (2, 4, 1), {"divide_by_initial_world_size": False}, size=3)


def collectives_job(rank):
    model = wrap(small_net(), plan="registration")
    train(model, rank.index, 3)
    counters = model.reducer.counters
    return counters.steps, counters.launches - counters.steps * model.reducer.buckets


def test_join_costs_one_step_in_all(ranks):
    assert ranks(collectives_job) == [(4, 0)] * 2


def buffers_job(rank, steps):
    model = wrap(normed_net())
    train(model, rank.index, steps[rank.index])
    require_same_everywhere(rank, values_of(model))
    return model.module[1].num_batches_tracked.item()


@pytest.mark.parametrize("steps", [(1, 4), (4, 1), (3, 3)])
def test_buffers_behind_join_are_of_a_rank_that_had_data_to_the_end(ranks, steps):
    assert ranks(buffers_job, steps) == [max(steps)] * 2


def agreeing_job(rank, steps):
    """Buffers after each step of this rank."""
    model = wrap(normed_net())
    seen = []
    with model.join():
        for step in range(steps[rank.index]):
            x, y = batch_of(rank.index, step)
            F.cross_entropy(model(x), y).backward()
            model.zero_grad()
            seen.append(model.module[1].running_mean.clone())
    return seen


def test_buffers_agree_within_join_once_the_leaving_of_a_rank_is_known(ranks):
    left, second, third = ranks(agreeing_job, (1, 4, 4), size=3)
    assert torch.equal(left[0], second[0]) and torch.equal(left[0], third[0])
    for step in (2, 3):
        assert torch.equal(second[step], third[step])


def early_job(rank, steps):
    model = wrap(small_net())
    error = raised(train, model, rank.index, steps[rank.index], throw_on_early_termination=True)
    for p in model.parameters():
        p.grad = None
    x, y = batch_of(rank.index)
    F.cross_entropy(model(x), y).backward()
    require_same_everywhere(rank, {n: p.grad for n, p in model.named_parameters()})
    return error


def test_join_can_raise_on_all_ranks_when_the_first_has_no_more(ranks):
    for error in ranks(early_job, (1, 3)):
        assert type(error) is RuntimeError
        assert "data ended on some ranks (ranks that have more: 1 of 2" in str(error)
    assert ranks(early_job, (2, 2)) == [None, None]


class Centred(torch.nn.Module):
    """Its forward makes a collective of its own, as SyncBatchNorm's does; of another size than any bucket's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(6, 8)
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x.float())
        mean = hidden.detach().mean(0)
        dist.all_reduce(mean)
        return self.last(hidden - mean / dist.get_world_size())


def step_of(model, rank, step, loop):
    x, y = batch_of(rank, step)
    if loop == "no grad first":
        with torch.no_grad():
            model(x)
    with model.step() if loop == "scope" else nullcontext():
        F.cross_entropy(model(x), y).backward()


def early_with_collectives_job(rank, steps):
    """Who leaves first, in what loop: torch's class raises on all ranks, and so does this one; then both go on."""
    found = []
    for loop in ("plain", "scope", "no grad first", "torch"):
        wrapper = wrap if loop != "torch" else DistributedDataParallel
        model = wrapper(Centred())

        def loops(model=model, loop=loop):
            with model.join(throw_on_early_termination=True):
                for step in range(steps[rank.index]):
                    step_of(model, rank.index, step, loop)
                    model.zero_grad()

        error = raised(loops)
        found.append(type(error).__name__)
        if loop != "torch":
            for step in range(2):
                model.zero_grad()
                step_of(model, rank.index, step, loop)
            require_same_everywhere(rank, {n: p.grad for n, p in model.named_parameters()})
            assert error is None or "throw_on_early_termination: true" in str(error)
    return found


@pytest.mark.parametrize("steps", [(1, 3), (2, 0), (2, 2)])
def test_join_raises_on_all_ranks_where_forward_has_collectives(ranks, steps):
    name = "NoneType" if steps == (2, 2) else "RuntimeError"
    assert ranks(early_with_collectives_job, steps) == [[name] * 4] * 2


def unsupported_job(rank):
    """Without throw_on_early_termination a collective in forward waits for a rank that has left: nobody dies of it."""
    model = wrap(Centred())

    def loop():
        with model.join():
            for step in range(1 + rank.index):
                step_of(model, rank.index, step, "plain")

    return raised(loop)


def test_a_collective_in_forward_meets_no_bucket_of_a_rank_that_has_left(ranks):
    left, waited = ranks(unsupported_job, timeout_s=3)
    assert isinstance(left, brimful.RankFailed), repr(left)
    assert isinstance(waited, RuntimeError), repr(waited)


def large_net():
    """Gradients of every kind: small, reduced where it lies, and sparse; one parameter goes unused."""
    torch.manual_seed(1)
    return torch.nn.ModuleDict(
        {
            "words": torch.nn.Embedding(7, 5, sparse=True),
            "large": torch.nn.Linear(5, 220_001, bias=False),
            "small": torch.nn.Linear(5, 3),
            "unused": torch.nn.Linear(2, 2),
        }
    )


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = large_net()

    def forward(self, words):
        x = self.nets["words"](words).mean(1)
        return self.nets["small"](x) + self.nets["large"](x).square().mean() * 100


def sharded_job(rank, steps, options, wire):
    """A left rank's shard of the optimizer steps with the mean of the ranks that have data."""
    values = []
    for sharded in (False, True):
        model = wrap(Words(), **wire)
        dense = [p for n, p in model.named_parameters() if "words" not in n]
        rest = torch.optim.SGD(model.module.nets["words"].parameters(), lr=0.1)
        if sharded:
            optimizer = ZeroRedundancyOptimizer(dense, torch.optim.SGD, lr=0.1)
            context = Join([model, optimizer], **options)
        else:
            optimizer = torch.optim.SGD(dense, lr=0.1)
            context = model.join(**options)
        with context:
            for step in range(steps[rank.index]):
                generator = torch.Generator().manual_seed(10 * step + rank.index)
                words = torch.randint(0, 7, (4, 3), generator=generator)
                model(words).square().mean().backward()
                optimizer.step()
                rest.step()
                optimizer.zero_grad()
                rest.zero_grad()
        require_same_everywhere(rank, values_of(model))
        values.append(values_of(model))
        model(
            torch.zeros(1, 1, dtype=torch.long)
        ).sum().backward()  # a step behind it, of all ranks
        assert model.reducer.counters.exchanges < 3 * max(steps) + 3
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "wire"),
    [
        ({}, {}),
        ({"divide_by_initial_world_size": False}, {"wire_dtype": torch.float64}),
    ],
)
@pytest.mark.parametrize("steps", [(1, 4), (3, 0)])
def test_torchs_join_over_a_model_and_a_sharded_optimizer(ranks, steps, options, wire):
    ranks(sharded_job, steps, options, wire)


def torchs_join_job(rank):
    """Beside torch's class: several steps in no_sync(), a rank that is to raise, and a context that is not enabled."""
    kinds = wrap, DistributedDataParallel
    found = []
    for kind in kinds:
        model = kind(small_net())
        assert model.join_process_group is dist.group.WORLD
        assert model.join_device == torch.device("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for step in range(2 + 4 * rank.index):
                x, y = batch_of(rank.index, step)
                with model.no_sync() if step % 2 == 0 else nullcontext():
                    F.cross_entropy(model(x), y).backward()
                if step % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
        with Join([model], enable=False):
            F.cross_entropy(model(batch_of(rank.index)[0]), batch_of(rank.index)[1]).backward()
        found.append(values_of(model))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-12, atol=0)
    for loop in ("plain", "scope"):
        model = wrap(Centred())

        def loops(model=model, loop=loop):
            with Join([model], throw_on_early_termination=True):
                for step in range(1 + rank.index):
                    step_of(model, rank.index, step, loop)

        error = raised(loops)
        assert type(error) is RuntimeError and "exhausted" in str(error), repr(error)
        with Join([model], enable=False):
            step_of(model, rank.index, 5, loop)
        require_same_everywhere(rank, {n: p.grad for n, p in model.named_parameters()})
    again = copy.deepcopy(wrap(small_net()))
    x, y = batch_of(rank.index)
    F.cross_entropy(again(x), y).backward()


def test_torchs_join_over_a_model(ranks):
    ranks(torchs_join_job)


def accumulating_job(rank):
    """no_sync inside join: only backwards that synchronise are matched."""
    models = wrap(small_net()), DistributedDataParallel(small_net())
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(2 + 4 * rank.index):
                x, y = batch_of(rank.index, step)
                if step % 2 == 0:
                    with model.no_sync():
                        F.cross_entropy(model(x), y).backward()
                    continue
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_join_with_accumulated_gradients(ranks):
    ranks(accumulating_job)


def failing_job(rank):
    model = wrap(small_net())

    def step(data):
        with model.step():
            if data == 2:
                raise ValueError("planted")
            x, y = batch_of(rank.index, data)
            F.cross_entropy(model(x), y).backward()

    def loop():
        with model.join():
            for data in range(1 + 3 * rank.index):
                step(data)
                model.zero_grad()

    return raised(loop)


def test_a_failure_reaches_the_ranks_that_have_left(ranks):
    left, failed = ranks(failing_job, timeout_s=5)
    assert type(failed) is ValueError
    assert type(left) is brimful.RankFailed and left.rank == 1 and "planted" in str(left)


def sizer_job(rank, steps):
    model = wrap(copy.deepcopy(small_net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    weights = []
    for batch in sizer.batches([batch_of(rank.index, step) for step in range(steps[rank.index])]):
        weights.append(sizer.step(batch, cross_entropy).weight)
        optimizer.step()
        optimizer.zero_grad()
    alone = small_net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(max(steps)):
        x, y = (
            torch.cat(part)
            for part in zip(
                *(batch_of(r, step) for r in range(rank.size) if step < steps[r]), strict=True
            )
        )
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
    assert same_bits(values_of(model), values_of(model.module))
    return weights


def test_a_sizers_loop_weights_every_sample_alike_without_join(ranks):
    assert ranks(sizer_job, (1, 3)) == [[11, 6, 6]] * 2
