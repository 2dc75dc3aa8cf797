"""Plain loops: the gradients of torch's class, and backwards that were thrown away or died."""

import pytest
import torch
from models import (
    Branches,
    classes,
    cross_entropy,
    gradients_of,
    relative_difference,
    require_equal_replicas,
    same_bits,
    wrap,
)
from test_large_gradients import WIDTH

import brimful


def beside_torch(rank, branch, unused=False):
    """Our class and torch's around equal modules."""
    ours, theirs = Branches(), Branches()
    ours.branch = theirs.branch = branch
    torch_class = torch.nn.parallel.DistributedDataParallel
    return wrap(ours), torch_class(theirs, find_unused_parameters=unused)


def plain_loops_job(rank):
    ours, theirs = beside_torch(rank, None)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    worst = 0.0
    for step in range(4):
        batch = classes(8, seed=10 * step + rank.index)
        for model in (ours, theirs):
            cross_entropy(model, batch).backward()
        worst = max(worst, relative_difference(gradients_of(ours), gradients_of(theirs)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    require_equal_replicas(ours)
    return worst


def test_a_plain_loop_gives_the_gradients_of_torchs_class(ranks):
    assert max(ranks(plain_loops_job)) < 1e-6
    assert max(ranks(plain_loops_job, size=3)) < 1e-6


def accumulation_job(rank):
    ours, theirs = beside_torch(rank, None)
    worst = 0.0
    for step in range(3):
        for model in (ours, theirs):
            for part in range(2):
                with model.no_sync():
                    cross_entropy(model, classes(4, seed=9 * step + part)).backward()
            cross_entropy(model, classes(4, seed=100 + rank.index)).backward()
        worst = max(worst, relative_difference(gradients_of(ours), gradients_of(theirs)))
        ours.zero_grad()
        theirs.zero_grad()
    for model in (ours, theirs):  # synchronised twice, without zero_grad between
        for part in range(2):
            cross_entropy(model, classes(4, seed=rank.index + 7 * part)).backward()
    return max(worst, relative_difference(gradients_of(ours), gradients_of(theirs)))


def test_accumulated_gradients_are_those_of_torchs_class(ranks):
    assert max(ranks(accumulation_job)) < 1e-6


def unused_job(rank):
    ours, theirs = beside_torch(rank, rank.index, unused=True)
    worst = 0.0
    for step in range(3):
        batch = classes(8, seed=10 * step + rank.index)
        for model in (ours, theirs):
            cross_entropy(model, batch).backward()
        mine, other = gradients_of(ours), gradients_of(theirs)
        never = [name for name, gradient in mine.items() if gradient is None]
        assert never == [name for name, gradient in other.items() if gradient is None]
        assert never == ["branches.2.weight", "branches.2.bias"]
        for name in never:
            del mine[name], other[name]
        worst = max(worst, relative_difference(mine, other))
        ours.zero_grad()
        theirs.zero_grad()
    return worst


def test_parameters_unused_on_some_ranks_are_treated_as_by_torchs_class(ranks):
    assert max(ranks(unused_job)) < 1e-6


class SometimesUsed(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(1)
        self.always = torch.nn.Linear(width, width)
        self.sometimes = torch.nn.Linear(width, width)

    def forward(self, x, use):
        y = self.always(x)
        return self.sometimes(y) if use else y


def thrown_away_job(rank, width):
    """Gradients of a backward that did not synchronise, thrown away: they leave no trace in what counts as used."""
    model = brimful.DistributedDataParallel(SometimesUsed(width))
    x = torch.ones(2, width) * (rank.index + 1)
    with model.no_sync():
        model(x, True).sum().backward()
    model.zero_grad()
    model(x, rank.index == 1).sum().backward()
    used = gradients_of(model)
    model.zero_grad()
    with model.no_sync():
        model(x, True).sum().backward()
    model.zero_grad()
    model(x, False).sum().backward()
    unused = gradients_of(model)
    assert used["sometimes.weight"] is not None and used["sometimes.bias"] is not None
    assert unused["sometimes.weight"] is None and unused["sometimes.bias"] is None
    return used


@pytest.mark.parametrize("width", [8, WIDTH])
def test_what_was_thrown_away_does_not_count_as_used(ranks, width):
    first, second = ranks(thrown_away_job, width)
    assert same_bits(first, second)


def small_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 20), torch.nn.Linear(20, 3)
    )


def two_forwards_job(rank, failing):
    """The first of two backwards dies on one rank and is caught: the second is in step with the other rank's."""
    model = brimful.DistributedDataParallel(small_net(), bucket_cap_mb=0.0001)
    clean = brimful.DistributedDataParallel(small_net(), bucket_cap_mb=0.0001)
    batches = [classes(8, seed=10 * rank.index + i) for i in range(3)]
    for _ in range(3):
        first, second = (cross_entropy(model, b) for b in batches[:2])
        if rank.index == failing:
            handle = model.module[0].weight.register_hook(fail)
        with pytest.raises((RuntimeError, brimful.RankFailed)):
            first.backward()
        if rank.index == failing:
            handle.remove()
        model.zero_grad(set_to_none=True) if rank.index != failing else None
        for p in model.parameters():
            p.grad = None
        second.backward()
        cross_entropy(clean, batches[1]).backward()
        assert same_bits(gradients_of(model), gradients_of(clean))
        for m in (model, clean):
            m.zero_grad()


def fail(gradient):
    raise RuntimeError("planted")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_second_backward_after_one_that_died_is_in_step(ranks, failing):
    ranks(two_forwards_job, failing)
