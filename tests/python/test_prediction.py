"""Pieces chosen by the memory that they will need: no step runs out of it, and nothing else of the step changes."""

from contextlib import contextmanager

import pytest
import torch
from models import classes, cross_entropy, rng_states, same_bits, seed, used, values_of, wrap
from rank_processes import raised

import brimful

ROWS = 240


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(50, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x):
        return self.layer(self.words(x))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LSTM(8, 24, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


def convolution():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(inplace=True),
        torch.nn.Dropout(0.2),
        torch.nn.Conv2d(8, 4, 3, stride=2),
    )


MODELS = {
    "convolution": (convolution, lambda rows: torch.randn(rows, 3, 12, 12)),
    "attention": (Attention, lambda rows: torch.randint(0, 50, (rows, 20))),
    "recurrent": (Recurrent, lambda rows: torch.randn(rows, 10, 8)),
}


def square(model, piece):
    return model(piece).square().mean()


@contextmanager
def limit(bytes):
    brimful.memory.set_limit("cpu", bytes)
    try:
        yield
    finally:
        brimful.memory.set_limit("cpu", None)


def peak_of_step(sizer, batch, loss_fn):
    """Of an unsplit one, over what is in use; the first makes what is made once."""
    for _ in range(2):
        before = used()
        outcome = sizer.step(batch, loss_fn)
        zero(sizer)
    return outcome.peak_bytes - before


def zero(sizer):
    for parameter in sizer._parameters:
        parameter.grad = None


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "wrapped"])
@pytest.mark.parametrize("name", MODELS)
def test_no_step_runs_out_of_memory_and_pieces_are_as_large_as_they_can_be(ranks, name, wrapped):
    ranks(steady_job, name, wrapped, size=1)


def steady_job(rank, name, wrapped):
    make, batch_of = MODELS[name]
    seed(0)
    model = wrap(make(), whole_path=True) if wrapped else make()
    batch = batch_of(ROWS)
    unsplit = peak_of_step(brimful.BatchSizer(model), batch, square)
    sizer = brimful.BatchSizer(model, predict=True)
    for share in (2.0, 0.7, 0.3, 0.5, 0.1):
        before = used()
        with limit(before + int(share * unsplit)):
            refused = brimful.memory.stats("cpu").ooms
            plan = sizer.plan(batch, square)
            outcome = sizer.step(batch, square)
        zero(sizer)
        assert brimful.memory.stats("cpu").ooms == refused
        assert (outcome.retries, outcome.pieces) == (0, plan.pieces)
        assert plan.used_bytes <= outcome.peak_bytes <= plan.peak_bytes <= plan.limit_bytes
        slack = 60_000 if name == "recurrent" else 20_000  # oneDNN rounds up to pages there
        assert (plan.peak_bytes - before) <= 1.02 * (outcome.peak_bytes - before) + slack
        if outcome.pieces > 1:  # fewer would not have fitted
            fewer = [len(part) for part in torch.arange(ROWS).tensor_split(outcome.pieces - 1)]
            with limit(used() + int(share * unsplit)):
                plain = brimful.BatchSizer(model)
                assert plain.step(batch, square, split=fewer).retries > 0
            zero(sizer)


def test_planning_leaves_nothing_behind():
    seed(0)
    model = convolution()
    sizer = brimful.BatchSizer(model)
    batch = torch.randn(20, 3, 12, 12)
    sizer.plan(torch.randn(20, 3, 10, 10), square)
    before, rng, bytes = values_of(model), rng_states(), used()
    plan = sizer.plan(batch, square)
    assert used() == bytes
    assert same_bits(values_of(model), before)
    assert rng_states() == rng
    assert all(p.grad is None for p in model.parameters())
    assert plan.pieces == 1 and plan.piece_rows == 20 and plan.limit_bytes is None
    assert plan.used_bytes < plan.peak_bytes


def test_a_shape_is_run_for_its_memory_once():
    calls = []

    def loss(model, piece):
        calls.append(tuple(piece.shape))
        return square(model, piece)

    sizer = brimful.BatchSizer(torch.nn.Linear(4, 4), predict=True)
    with limit(used() + 10_000_000):
        for columns, rows in ((4, 18), (4, 30), (4, 5)):
            sizer.step(torch.randn(rows, columns), loss)
            zero(sizer)
        assert calls == [(2, 4)] * 4 + [(3, 4)] * 2 + [(16, 4)] * 2 + [(18, 4), (30, 4), (5, 4)]
        calls.clear()
        sizer.step(torch.randn(16, 3, 4), loss)
        zero(sizer)
        assert len(calls) == 9
    calls.clear()
    sizer.step(torch.randn(12, 2, 4), loss)  # no limit: nothing to predict
    assert len(calls) == 1


def test_a_batch_of_few_rows_is_simply_run():
    sizer = brimful.BatchSizer(torch.nn.Linear(4, 4), predict=True)
    with limit(used() + 10_000_000):
        for rows in (1, 2):
            assert sizer.plan(torch.randn(rows, 4), square) is None
            assert sizer.step(torch.randn(rows, 4), square).pieces == 1
            zero(sizer)


def test_work_whose_memory_follows_no_law_is_split_when_memory_runs_out():
    kept = []

    def wild(model, piece):
        kept.append([torch.empty(10) for _ in range(100 if len(kept) >= 4 else 0)])
        return square(model, piece)

    sizer = brimful.BatchSizer(torch.nn.Linear(40, 400), predict=True)
    batch = torch.randn(500, 40)
    unsplit = peak_of_step(brimful.BatchSizer(sizer._model), batch, square)
    with limit(used() + int(0.6 * unsplit)):
        assert sizer.plan(batch, wild) is None
        outcome = sizer.step(batch, wild)
    assert outcome.pieces == 2 and outcome.retries == 1


def test_without_memory_for_the_smallest_rows_the_step_says_so():
    model = torch.nn.Linear(40, 4)
    sizer = brimful.BatchSizer(model, predict=True)
    huge = torch.randn(4, 200_000, 40)
    with limit(used() + 1_000_000):
        error = raised(sizer.step, huge, square)
    assert type(error) is brimful.BatchTooLarge
    assert model.weight.grad is None


def test_the_gradient_is_that_of_the_whole_batch():
    seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3))
    batch = classes(400)
    cross_entropy(model, batch).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    unsplit = peak_of_step(brimful.BatchSizer(model), batch, cross_entropy)
    sizer = brimful.BatchSizer(model, predict=True)
    with limit(used() + int(0.4 * unsplit)):
        assert sizer.step(batch, cross_entropy).pieces > 1
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


def ranks_job(rank, failing):
    """One rank has a limit, and a shape that the loss function fails on where it is run for its memory."""
    seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(6, 200), torch.nn.Linear(200, 3)))
    sizer = brimful.BatchSizer(model, predict=True)
    batch = classes(300 + rank.index, seed=rank.index)
    unsplit = peak_of_step(brimful.BatchSizer(model), batch, cross_entropy)
    mine = rank.index == rank.size - 1
    calls = []

    def loss(model, piece):
        calls.append(len(piece[0]))
        if failing and mine and len(calls) == failing:
            raise ValueError("planted")
        return cross_entropy(model, piece)

    pieces, errors = [], []
    with limit(used() + int(0.5 * unsplit) if mine else None):
        for _ in range(3):
            errors.append(raised(lambda: pieces.append(sizer.step(batch, loss).pieces)))
            model.zero_grad()
    return pieces, [error and (type(error).__name__, str(error)) for error in errors]


@pytest.mark.parametrize("failing", range(9))
def test_ranks_stay_in_step_whatever_one_of_them_runs_for_its_memory(ranks, failing):
    (pieces, errors), (split, own) = ranks(ranks_job, failing)
    if failing:
        assert [name for name, _ in filter(None, errors)] == ["RankFailed"]
        assert [name for name, _ in filter(None, own)] == ["ValueError"]
        assert "rank 1: ValueError: planted" in next(filter(None, errors))[1]
    else:
        assert not any(errors) and not any(own)
    assert set(pieces) == {1} and min(split) > 1
    assert len(pieces) == len(split) == (2 if failing else 3)


def test_a_plan_refuses_what_a_step_refuses():
    sizer = brimful.BatchSizer(torch.nn.Linear(4, 4))
    assert type(raised(sizer.plan, torch.randn(0, 4), square)) is ValueError
    assert type(raised(sizer.plan, None, square)) is TypeError
    assert type(raised(sizer.plan, brimful.NO_DATA, square)) is TypeError
    assert type(raised(sizer.plan, torch.randn(9, 4), None)) is TypeError
    assert type(raised(sizer.plan, torch.randn(9, 5), square)) is RuntimeError
    sizer.step(torch.randn(9, 4), square)
    assert "zero_grad" in str(raised(sizer.plan, torch.randn(9, 4), square))
