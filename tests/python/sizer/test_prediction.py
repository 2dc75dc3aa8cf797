"""Pieces chosen by the memory that they will need: no step runs out of it, and nothing else of the step changes."""

from contextlib import contextmanager

import pytest
import torch
from models import classes, cross_entropy, rng_states, same_bits, seed, used, values_of, wrap
from rank_processes import raised
from torch.utils._python_dispatch import TorchDispatchMode

import brimful
from brimful.reducer._whole_path import whole_path

ROWS = 240


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(50, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x):
        return self.layer(self.words(x))


class HalfAttention(torch.nn.Module):
    """Its backward in bfloat16 takes buffers for each row and head."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(32, 96, dtype=torch.bfloat16)
        self.outer = torch.nn.Linear(32, 32, dtype=torch.bfloat16)

    def forward(self, x):
        heads = [y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.inner(x).chunk(3, -1)]
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.outer(mixed.transpose(1, 2).flatten(2))


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
    "half attention": (
        HalfAttention,
        lambda rows: torch.randn(rows, 24, 32, dtype=torch.bfloat16),
    ),
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
    with whole_path():
        model = wrap(make()) if wrapped else make()
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
            with limit(used() + int(share * unsplit) - slack):
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


def test_a_resumed_job_goes_on_with_the_pieces_that_were_found_and_rehearses_nothing():
    seed(0)
    model = convolution()
    batch, last = torch.randn(ROWS, 3, 12, 12), torch.randn(ROWS // 8, 3, 12, 12)
    calls = []

    def loss(model, piece):
        calls.append(len(piece))
        return square(model, piece)

    def step(sizer, batch, room):
        calls.clear()
        with limit(used() + room):
            outcome = sizer.step(batch, loss)
        zero(sizer)
        return outcome, len(calls) == outcome.pieces

    room = 2_000_000
    first = brimful.BatchSizer(model, predict=True)
    found, was_quiet = step(first, batch, room)
    assert found.pieces > 1 and found.retries == 0 and not was_quiet
    step(first, last, room)  # an epoch's last batch is not what the next one begins with
    state = first.state_dict()
    assert state["piece_rows"] == found.split[0]

    resumed = brimful.BatchSizer(model, predict=True)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    again, was_quiet = step(resumed, batch, room)
    assert was_quiet and again.split == found.split and again.retries == 0
    with limit(used() + room):
        assert resumed.plan(batch, loss).pieces == found.pieces
    outcome, was_quiet = step(resumed, batch, room // 2)  # they are not right there
    assert not was_quiet and outcome.pieces > found.pieces and outcome.retries == 0

    other_shape = brimful.BatchSizer(model, predict=True)
    other_shape.load_state_dict(state)
    _, was_quiet = step(other_shape, torch.randn(ROWS, 3, 10, 10), room)
    assert not was_quiet

    without = brimful.BatchSizer(model)
    without.load_state_dict(state)
    assert step(without, batch, room)[0].split == found.split


def test_found_pieces_that_no_longer_fit_are_rehearsed_in_the_next_step():
    seed(0)
    model = convolution()
    batch = torch.randn(ROWS, 3, 12, 12)
    first = brimful.BatchSizer(model, predict=True)
    with limit(used() + 2_000_000):
        first.step(batch, square)
    zero(first)
    resumed = brimful.BatchSizer(model, predict=True)
    resumed.load_state_dict(first.state_dict())
    calls = []

    def wider(model, piece):
        calls.append(1)
        return model(torch.cat([piece, piece])).square().mean()

    with limit(used() + 2_000_000):
        assert resumed.step(batch, wider).retries > 0
        zero(resumed)
        calls.clear()
        outcome = resumed.step(batch, wider)
    zero(resumed)
    assert outcome.retries == 0 and len(calls) > outcome.pieces


def test_a_step_waits_once_for_the_device_with_a_forecast_and_without_a_wrapper():
    """What a program waits for on a GPU is a value that it reads: `item` is `_local_scalar_dense`."""
    seed(0)

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    batch = torch.randn(ROWS, 8)
    for predict in (True, False):
        sizer = brimful.BatchSizer(model, predict=predict, pieces=4)
        pieces = []
        for step in range(3):
            with limit(used() + 60_000), Reads() as reads:
                pieces.append(sizer.step(batch, square).pieces)
            zero(sizer)
            if step > 0:  # the first one rehearses, or runs out
                assert reads.count == 1
        assert pieces[-1] > 1


@pytest.mark.parametrize("rows", [16, 1000])
@pytest.mark.parametrize("fits", [1, 2])
def test_a_rehearsal_that_runs_out_is_where_the_step_begins(no_limit, rows, fits):
    """Room for fewer rows than the rehearsal has: nothing is halved to find that out."""
    row_bytes = 1 << 20
    model = torch.nn.Linear(4, 4)

    def loss(model, piece):
        wide = torch.empty(len(piece), row_bytes, dtype=torch.uint8)
        return model(piece).square().mean() + 0 * len(wide)

    sizer = brimful.BatchSizer(model, predict=True)
    with limit(used() + fits * row_bytes + row_bytes // 2):
        outcome = sizer.step(torch.randn(rows, 4), loss)
        assert (outcome.retries, outcome.split[0]) == (0, fits)
        zero(sizer)
        again = sizer.step(torch.randn(rows, 4), loss)
        assert again.retries == 0
        zero(sizer)
    with limit(used() + 40 * row_bytes):
        for _ in range(6):
            grown = sizer.step(torch.randn(16, 4), loss)
            zero(sizer)
        assert grown.pieces == 1


def test_a_thousand_rows_of_which_one_fits_need_no_more_than_the_retries(no_limit):
    row_bytes = 1 << 20
    model = torch.nn.Linear(4, 4)

    def loss(model, piece):
        torch.empty(len(piece), row_bytes, dtype=torch.uint8)
        return model(piece).square().mean()

    with limit(used() + 3 * row_bytes // 2):
        outcome = brimful.BatchSizer(model).step(torch.randn(1000, 4), loss)
    assert outcome.retries <= 8 and max(outcome.split) == 1
