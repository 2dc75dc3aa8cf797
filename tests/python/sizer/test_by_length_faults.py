"""Rows in order of length where memory runs out at any allocation, and over several ranks."""

import pytest
import torch
from models import wrap
from test_by_length import Tokens, gradients_of, loss_fn, off, padded_gradients, tokens

import brimful
from brimful import _C


def test_an_allocation_that_is_refused_anywhere_leaves_the_gradient_exact():
    model = Tokens()
    batch = tokens(rows=12)
    expected = padded_gradients(model, batch)
    sizer = brimful.BatchSizer(model, by_length=True, pieces=2)
    sizer.step(batch, loss_fn)
    model.zero_grad()
    retried = 0
    for index in range(0, 400, 7):
        sizer = brimful.BatchSizer(model, by_length=True, pieces=2)
        sizer._by_length._checks_left = 0  # the check has allocations of its own
        with _C._FaultAt(index) as fault:
            outcome = sizer.step(batch, loss_fn)
        retried += outcome.retries
        gradients = gradients_of(model)
        assert off(gradients, expected) < 1e-5, index
        model.zero_grad()
        brimful.BatchSizer(model, by_length=True).step(batch, loss_fn, split=outcome.split)
        again = gradients_of(model)
        assert all(torch.equal(a, b) for a, b in zip(again, gradients, strict=True)), index
        model.zero_grad()
        if not fault.fired:
            break
    assert retried > 10


def of_ranks(rank, dtype, left):
    batches = [tokens(rows=9 + 4 * r, left=left, seed=r) for r in range(rank.size)]
    plain = Tokens(dtype)
    weights = [brimful.token_weight(batch) for batch in batches]
    loss = sum(loss_fn(plain, b) * w for b, w in zip(batches, weights, strict=True)) / sum(weights)
    loss.backward()
    expected = gradients_of(plain)
    model = wrap(Tokens(dtype))
    sizer = brimful.BatchSizer(model, by_length=True, pieces=3)
    worst = 0.0
    for _ in range(3):
        outcome = sizer.step(batches[rank.index], loss_fn)
        assert outcome.weight == sum(weights)
        assert abs(outcome.loss - loss.item()) < 1e-5 * abs(loss.item())
        worst = max(worst, off(gradients_of(model), expected))
        model.zero_grad()
    return worst


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_the_mean_is_over_the_tokens_of_all_ranks(ranks, dtype, left):
    assert max(ranks(of_ranks, dtype, left)) < (1e-5 if dtype == torch.float32 else 1e-12)


def of_a_rank_without_labels(rank):
    batch = tokens()
    plain = Tokens()
    expected = padded_gradients(plain, batch)
    if rank.index == 1:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    model = wrap(Tokens())
    outcome = brimful.BatchSizer(model, by_length=True, pieces=2).step(batch, loss_fn)
    assert (outcome.pieces == 0) == (rank.index == 1)
    return off(gradients_of(model), expected)


def test_a_rank_whose_labels_are_all_ignored_adds_nothing(ranks):
    assert max(ranks(of_a_rank_without_labels)) < 1e-5


def of_no_labels(rank):
    batch = tokens()
    batch["labels"].fill_(-100)
    sizer = brimful.BatchSizer(wrap(Tokens()), by_length=True)
    with pytest.raises(ValueError, match="no label of the batch counts"):
        sizer.step(batch, loss_fn)


def test_labels_that_are_ignored_on_all_ranks_are_refused_on_all(ranks):
    ranks(of_no_labels)


def of_a_bad_batch(rank):
    batch = tokens()
    if rank.index == 0:
        batch["attention_mask"] = torch.ones(24, 1, 40, 40)
    sizer = brimful.BatchSizer(wrap(Tokens()), by_length=True)
    expected = ValueError if rank.index == 0 else brimful.RankFailed
    with pytest.raises(expected, match="another shape"):
        sizer.step(batch, loss_fn)
    sizer.step(tokens(), loss_fn)


def test_a_bad_batch_of_one_rank_fails_the_step_of_all(ranks):
    ranks(of_a_bad_batch)
