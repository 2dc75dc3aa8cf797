"""Gradients that come again behind their bucket's launch: reentrant checkpointing of a layer that is used twice."""

import copy

import pytest
import torch
from models import (
    classes,
    cross_entropy,
    gradients_of,
    relative_difference,
    wrap,
)
from rank_processes import raised
from torch.utils.checkpoint import checkpoint

import brimful

BIG_BUCKET_MB = 25


class Shared(torch.nn.Module):
    """A layer applied twice under reentrant checkpointing, with or without a layer below it."""

    def __init__(self, below=False):
        super().__init__()
        torch.manual_seed(7)
        self.below = torch.nn.Linear(3, 3) if below else torch.nn.Identity()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        x = self.below(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x


def shared_loss(model, piece):
    return cross_entropy(model, (piece[0].detach().requires_grad_(), piece[1]))


class FaultInSecondRecompute:
    """Raises in the layer's fourth forward: two forwards and a recompute, with its gradient, came before."""

    def __init__(self, layer):
        self.calls = 0
        layer.register_forward_pre_hook(self.on_forward)

    def on_forward(self, *_):
        self.calls += 1
        if self.calls == 4:
            raise torch.OutOfMemoryError("planted")


def recompute_shortage_job(rank, wrapped):
    batches = [classes(6, features=3, seed=r) for r in range(rank.size if wrapped else 1)]
    reference = Shared()
    sum(shared_loss(reference, batch) / len(batches) for batch in batches).backward()
    model = wrap(Shared(), bucket_cap_mb=BIG_BUCKET_MB) if wrapped else Shared()
    faulty = rank.index == rank.size - 1
    if faulty:
        FaultInSecondRecompute((model.module if wrapped else model).layer)
    outcome = brimful.BatchSizer(model).step(batches[rank.index], shared_loss)
    assert relative_difference(gradients_of(model), gradients_of(reference)) < 1e-6
    return outcome.retries


@pytest.mark.parametrize(("wrapped", "size"), [(False, 1), (True, 1), (True, 2)])
def test_a_step_does_not_stand_while_a_reentrant_gradient_may_come_again(ranks, wrapped, size):
    assert ranks(recompute_shortage_job, wrapped, size=size)[-1] >= 1


def repeated_gradient_job(rank, below):
    net = Shared(below)
    model = wrap(copy.deepcopy(net), bucket_cap_mb=BIG_BUCKET_MB)
    batches = [classes(6, features=3, seed=r) for r in range(rank.size)]
    sum(shared_loss(net, batch) / rank.size for batch in batches).backward()
    worst = 0.0
    for _ in range(3):
        shared_loss(model, batches[rank.index]).backward()
        worst = max(worst, relative_difference(gradients_of(model), gradients_of(net)))
        model.zero_grad()
    return worst


@pytest.mark.parametrize("below", [True, False])
def test_in_a_plain_loop_a_gradient_that_comes_twice_is_averaged_whole(ranks, below):
    assert max(ranks(repeated_gradient_job, below)) < 1e-6


class Twice(torch.nn.Module):
    """A layer that reentrant checkpointing gives two gradients in one backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(6, 3)
        self.shared = torch.nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return x


def twice_job(rank, with_sizer):
    net = Twice()
    model = wrap(copy.deepcopy(net), bucket_cap_mb=0.00002)
    batches = [classes(6, seed=r) for r in range(rank.size)]
    sum(cross_entropy(net, batch) / rank.size for batch in batches).backward()
    sizer = brimful.BatchSizer(model) if with_sizer else None
    retries, errors = [], []
    for _ in range(3):
        if sizer:
            retries.append(sizer.step(batches[rank.index], cross_entropy).retries)
        else:
            errors.append(raised(lambda: cross_entropy(model, batches[rank.index]).backward()))
            if errors[-1] is not None:
                model.zero_grad()
                continue
        assert relative_difference(gradients_of(model), gradients_of(net)) < 1e-6
        model.zero_grad()
    return retries, errors


def test_a_late_gradient_is_repeated_once_and_learned(ranks):
    for retries, _ in ranks(twice_job, True):
        assert retries == [1, 0, 0]


def test_a_late_gradient_in_a_plain_loop_names_parameter_and_remedy(ranks):
    for _, errors in ranks(twice_job, False):
        assert errors[1:] == [None, None]
        assert "(parameter: shared." in str(errors[0])
        assert "use_reentrant=False" in str(errors[0])
