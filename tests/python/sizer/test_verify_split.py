"""verify_split: what mixes the rows of a batch is named; nothing of the comparison stays behind."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from models import (
    classes,
    cross_entropy,
    noisy_cross_entropy,
    rng_states,
    same_bits,
    seed,
    values_of,
    wrap,
)
from rank_processes import raised
from torch.utils.checkpoint import checkpoint

import brimful

BATCH = classes(8)


def net(*middle):
    seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), *middle, torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )


class BatchMean(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Similarity(torch.nn.Module):
    """Its output has rows in both dimensions."""

    def forward(self, x):
        return (x @ x.T).softmax(1) @ x


class Block(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *, scale=1.0):
        return x + scale * self.inner(x)


class Attention(torch.nn.Module):
    """Time in the first dimension, rows in the second."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout)

    def forward(self, x):
        steps = x[:, None, :].expand(-1, 5, -1).transpose(0, 1) * torch.arange(1, 6)[:, None, None]
        return self.encoder(steps).mean(0)


class Fold(torch.nn.Module):
    """Puts time and rows into one dimension, in which the rows of a piece are no run."""

    def forward(self, x):
        return x.expand(3, *x.shape).reshape(3 * len(x), 16)


class TimeMajor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fold, self.linear = Fold(), torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(self.fold(x)).view(3, len(x), 16).mean(0)


class Shift(torch.nn.Module):
    """Has a gradient that is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.softmax(x + self.by, 1)


class FunctionalDropout(torch.nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.4, self.training) * torch.rand(len(x), 1)


class Recomputed(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def contrastive(model, piece):
    out = F.normalize(model(piece[0]))
    return F.cross_entropy(out @ out.T / 0.1, torch.arange(len(out)))


@pytest.mark.parametrize("pieces", [2, 3, 8])
@pytest.mark.parametrize(
    "middle",
    [
        lambda: [torch.nn.LayerNorm(16)],
        lambda: [torch.nn.GroupNorm(4, 16)],
        lambda: [torch.nn.BatchNorm1d(16).eval()],
        lambda: [Attention()],
        lambda: [TimeMajor()],
        lambda: [Shift()],
    ],
    ids=["layer", "group", "batch in eval", "attention", "time-major", "shift"],
)
def test_models_that_keep_rows_apart_are_equal(middle, pieces):
    check = brimful.verify_split(net(*middle()), BATCH, cross_entropy, pieces=pieces)
    assert check.equal, check
    assert (check.coupled, check.random, check.loss_coupled) == ([], [], False)
    assert 0 <= check.loss_difference < 1e-6 and 0 < check.gradient_difference < 1e-4
    assert check.rtol == torch.finfo(torch.float32).eps ** 0.5


@pytest.mark.parametrize(
    ("middle", "names"),
    [
        (lambda: [torch.nn.BatchNorm1d(16)], ["1"]),
        (lambda: [BatchMean()], ["1"]),
        (lambda: [Similarity()], ["1"]),
        (lambda: [torch.nn.ReLU(inplace=True), torch.nn.BatchNorm1d(16)], ["2"]),
        (lambda: [Block(torch.nn.BatchNorm1d(16)), BatchMean()], ["1.inner"]),
        (lambda: [TimeMajor(), Attention(), BatchMean()], ["3"]),
        (lambda: [Block(torch.nn.Sequential(torch.nn.Tanh(), BatchMean()))], ["1.inner.1"]),
        (lambda: [torch.nn.BatchNorm1d(16, track_running_stats=False).eval()], ["1"]),
    ],
)
def test_the_first_module_that_mixes_rows_is_named(middle, names):
    check = brimful.verify_split(net(*middle()), BATCH, cross_entropy)
    assert not check.equal
    assert check.coupled == names
    assert check.random == [] and not check.loss_coupled
    assert check.gradient_difference > 0.01 and check.worst_parameter
    assert f"coupled={names!r}" in repr(check)


def test_modules_side_by_side_are_all_named_and_the_model_itself_by_no_name():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.BatchNorm1d(6), BatchMean()
            self.head = torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.left(x) + self.right(x))

    class ByItself(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x / x.std(0))

    assert brimful.verify_split(Both(), BATCH, cross_entropy).coupled == ["left", "right"]
    check = brimful.verify_split(ByItself(6, 3), BATCH, cross_entropy)
    assert check.coupled == [""] and not check.loss_coupled


def test_a_loss_among_the_modules_is_the_mean_of_its_pieces():
    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.head, self.loss = BatchMean(), net(), torch.nn.CrossEntropyLoss()

        def forward(self, x, y):
            return self.loss(self.head(x), y) + self.left(x).square().mean()

    def loss_fn(model, piece):
        return model(*piece)

    assert brimful.verify_split(WithLoss(), BATCH, loss_fn).coupled == ["left"]


def test_a_loss_that_mixes_rows_is_named_as_the_loss():
    check = brimful.verify_split(net(), BATCH, contrastive)
    assert not check.equal and check.loss_coupled
    assert check.coupled == []
    total = brimful.verify_split(net(), BATCH, lambda m, p: 8 * cross_entropy(m, p) / len(p[0]))
    assert not total.equal and total.loss_coupled  # a sum, where a mean was asked for


def test_a_loss_with_a_weight_is_compared_as_the_sizer_weighs_it():
    weights = torch.tensor([1.0, 5.0, 0.5])

    def weighted(model, piece):
        of_rows = weights[piece[1]]
        return F.cross_entropy(model(piece[0]), piece[1], weights), float(of_rows.sum())

    assert brimful.verify_split(net(), BATCH, weighted).equal
    assert not brimful.verify_split(net(), BATCH, lambda m, p: weighted(m, p)[0]).equal


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize(
    ("middle", "names"),
    [
        (lambda: [torch.nn.Dropout(0.4)], ["1"]),
        (lambda: [FunctionalDropout()], ["1"]),
        (lambda: [torch.nn.Dropout(0.4), Block(torch.nn.Dropout(0.2))], ["1", "2.inner"]),
        (lambda: [Attention(0.3)], None),
        (
            lambda: [Recomputed(torch.nn.Sequential(torch.nn.Dropout(0.4), torch.nn.Tanh()))],
            ["1.inner.0"],
        ),
    ],
)
def test_random_modules_are_named_as_random_and_give_the_same_with_the_same_numbers(
    middle, names, pieces
):
    check = brimful.verify_split(net(*middle()), BATCH, cross_entropy, pieces=pieces)
    assert check.equal, check
    assert check.coupled == [] and not check.loss_coupled
    assert check.random == names if names else len(check.random) >= 2


def test_what_is_coupled_behind_dropout_is_found():
    model = net(torch.nn.Dropout(0.4), torch.nn.BatchNorm1d(16), FunctionalDropout())
    check = brimful.verify_split(model, BATCH, cross_entropy)
    assert (check.equal, check.coupled, check.random) == (False, ["2"], ["1", "3"])
    check = brimful.verify_split(net(torch.nn.Dropout(0.4)), BATCH, contrastive)
    assert (check.coupled, check.loss_coupled) == ([], True)


def test_random_numbers_that_cannot_be_given_again_are_not_called_coupled():
    class Ragged(torch.nn.Module):
        def forward(self, x):
            return x + torch.rand(7)[:1] * torch.rand(len(x) + 1)[:-1, None]

    check = brimful.verify_split(net(Ragged()), BATCH, cross_entropy)
    assert not check.equal
    assert (check.coupled, check.random, check.loss_coupled) == ([], ["1"], False)
    check = brimful.verify_split(net(), BATCH, noisy_cross_entropy)
    assert (check.equal, check.coupled, check.loss_coupled) == (False, [], False)


def mixup(model, piece):
    x, y = piece
    other = torch.randperm(len(x))
    return F.cross_entropy(model(0.7 * x + 0.3 * x[other]), y)


def negatives(model, piece):
    x = piece[0]
    drawn = torch.randint(len(x), (len(x),))
    return (1 + model(x[drawn]) - model(x)).relu().mean()


def one_of_them(model, piece):
    x = piece[0]
    return (model(x) - model(x[torch.randint(0, len(x), (1,))])).square().mean()


def in_place(model, piece):
    x = piece[0]
    drawn = torch.empty(len(x), dtype=torch.long).random_(0, len(x))
    return (model(x) * model(x[drawn])).mean()


def by_weights(model, piece):
    x = piece[0]
    drawn = torch.multinomial(torch.ones(len(x)), len(x), replacement=True)
    return (model(x) * model(x[drawn])).mean()


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("loss_fn", [mixup, negatives, one_of_them, in_place, by_weights])
def test_a_loss_that_draws_places_of_rows_is_named_as_the_loss(loss_fn, pieces):
    check = brimful.verify_split(net(), BATCH, loss_fn, pieces=pieces)
    assert (check.equal, check.coupled, check.loss_coupled) == (False, [], True)


class Mixing(torch.nn.Module):
    def forward(self, x):
        return x + x[torch.randperm(len(x))]


def test_a_module_that_draws_places_of_rows_is_named():
    check = brimful.verify_split(net(Mixing()), BATCH, cross_entropy)
    assert (check.equal, check.coupled, check.random) == (False, ["1"], ["1"])
    assert not check.loss_coupled


def test_places_of_other_things_are_given_again():
    def columns(model, piece):
        drawn = torch.randint(6, (len(piece[0]), 6))
        return cross_entropy(model, (piece[0].gather(1, drawn), piece[1]))

    assert brimful.verify_split(net(), BATCH, columns).equal


def test_an_error_in_a_piece_says_which_rows_it_had():
    def needs_all(model, piece):
        if len(piece[0]) < 8:
            raise RuntimeError("a width that is not the batch's")
        return cross_entropy(model, piece)

    with pytest.raises(RuntimeError) as caught:
        brimful.verify_split(net(), BATCH, needs_all)
    (note,) = caught.value.__notes__
    assert "run whole before (rows: 0 to 4 of 8)" in note and "split_fn" in note


def test_nothing_of_the_comparison_stays():
    model = net(torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3))
    first, second, *_ = model.parameters()
    first.grad = kept = torch.randn_like(first)
    bits = kept.clone()

    def noisy(model, piece):
        x = piece[0] * random.uniform(0.9, 1.1) + float(numpy.random.rand())
        return cross_entropy(model, (x, piece[1]))

    def failing(model, piece):
        loss = noisy(model, piece)
        if len(piece[0]) < 8:
            raise KeyError("planted")
        return loss

    before, states = values_of(model), rng_states()
    for loss_fn, kind in ((noisy, type(None)), (failing, KeyError)):
        assert type(raised(brimful.verify_split, model, BATCH, loss_fn)) is kind
        assert same_bits(values_of(model), before)
        assert rng_states() == states
        assert first.grad is kept and torch.equal(kept, bits)
        assert second.grad is None
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        assert model.training


def test_both_runs_begin_with_the_same_buffers_and_numbers():
    seen = []

    def noting(model, piece):
        seen.append((model[1].running_mean.clone(), random.random(), numpy.random.rand()))
        return cross_entropy(model, piece)

    brimful.verify_split(net(torch.nn.BatchNorm1d(16)), BATCH, noting)
    whole, first, second = seen
    assert torch.equal(whole[0], first[0]) and whole[1:] == first[1:]
    assert not torch.equal(first[0], second[0])


def test_batches_and_models_are_those_of_a_sizer():
    check = brimful.verify_split(
        [net(), net(torch.nn.BatchNorm1d(16))],
        {"x": BATCH[0].T, "y": BATCH[1]},
        lambda models, p: F.cross_entropy(models[0](p["x"].T) + models[1](p["x"].T), p["y"]),
        batch_dim={"x": 1},
    )
    assert check.coupled == ["1.1"]
    check = brimful.verify_split(
        net(),
        [BATCH],
        lambda m, p: cross_entropy(m, p[0]),
        size_fn=lambda batch: len(batch[0][0]),
        split_fn=lambda batch, begin, end: [tuple(t[begin:end] for t in batch[0])],
    )
    assert check.equal


def test_low_precision_is_given_room():
    def autocast(model, piece):
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model, piece)

    check = brimful.verify_split(net(torch.nn.LayerNorm(16)), BATCH, autocast)
    assert check.rtol == torch.finfo(torch.bfloat16).eps ** 0.5
    assert check.equal
    strict = brimful.verify_split(net(), BATCH, cross_entropy, rtol=0)
    assert strict.rtol == 0 and not strict.equal


def wrapped_job(rank):
    """One rank alone may ask: its wrapper takes no part."""
    model = wrap(net(torch.nn.BatchNorm1d(16)))
    check = brimful.verify_split(model, BATCH, cross_entropy) if rank.index == 0 else None
    weight = brimful.BatchSizer(model).step(BATCH, cross_entropy).weight
    return weight, check and check.coupled


def test_one_rank_of_a_wrapped_model_can_ask(ranks):
    assert ranks(wrapped_job) == [(16, ["1"]), (16, None)]


def test_a_compiled_model_keeps_the_names_of_its_modules(fresh_compiler):
    model = torch.compile(net(torch.nn.BatchNorm1d(16)), backend="eager")
    assert brimful.verify_split(model, BATCH, cross_entropy).coupled == ["1"]


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        ((net(), classes(3), cross_entropy), {"pieces": 4}, ValueError, "(rows: 3, pieces: 4)"),
        ((net(), BATCH, cross_entropy), {"pieces": 1}, ValueError, "(pieces: 1)"),
        ((net(), BATCH, cross_entropy), {"rtol": -1.0}, ValueError, "(rtol: -1)"),
        ((net().requires_grad_(False), BATCH, cross_entropy), {}, ValueError, "(parameters: 4)"),
        ((net(), BATCH, "loss"), {}, TypeError, "loss_fn must be callable"),
        (("model", BATCH, cross_entropy), {}, TypeError, "model must be a module"),
        ((net(), "text", cross_entropy), {}, TypeError, "holds no tensor"),
        ((net(), BATCH, lambda m, p: None), {}, TypeError, "returned no tensor"),
        ((net(), BATCH, lambda m, p: m(p[0])), {}, ValueError, "the loss is not a scalar"),
        (
            (net(), BATCH, lambda m, p: (cross_entropy(m, p), 0)),
            {},
            ValueError,
            "the weights of the batch sum to 0",
        ),
    ],
)
def test_bad_input_is_refused(arguments, options, kind, words):
    error = raised(brimful.verify_split, *arguments, **options)
    assert type(error) is kind and words in str(error), error
