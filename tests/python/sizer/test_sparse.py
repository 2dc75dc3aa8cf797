"""Sparse gradients in a sizer's steps."""

import copy

import pytest
import torch
from models import (
    FaultOnce,
    Words,
    cross_entropy,
    gradients_of,
    relative_difference,
    require_equal_replicas,
    words_batch,
    wrap,
)

import brimful


def sparse_job(rank, sparse_last):
    net = Words(sparse_last)
    model = wrap(copy.deepcopy(net))
    fault = FaultOnce(model.parameters())
    batches = [words_batch(5 + r, r) for r in range(rank.size)]
    total = sum(len(b[1]) for b in batches)
    sum(cross_entropy(net, b) * len(b[1]) / total for b in batches).backward()
    expected = gradients_of(net)
    fired = 0
    for faulty in range(rank.size):
        for at in [None, *range(5)]:
            fault.arm(at if rank.index == faulty else None)
            brimful.BatchSizer(model).step(batches[rank.index], cross_entropy)
            fired += fault.fired
            assert model.module.words.weight.grad.is_sparse
            assert relative_difference(gradients_of(model), expected) < 1e-6, at
            model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        cross_entropy(model, batches[rank.index]).backward()  # a plain loop
        optimizer.step()
        optimizer.zero_grad()
    require_equal_replicas(model)
    return fired


@pytest.mark.parametrize("sparse_last", [False, True])
def test_sparse_gradients_survive_a_shortage(ranks, sparse_last):
    assert ranks(sparse_job, sparse_last) == [5, 5]
