"""What a sizer does about BatchNorm when it splits a batch."""

import logging

import pytest
import torch
from models import classes, cross_entropy, same_bits, values_of, wrap
from rank_processes import raised

import brimful
from brimful import memory

ROWS = 12
BATCH = classes(ROWS)
pytestmark = pytest.mark.usefixtures("no_limit")


def net(momentum=0.1, **options):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8, momentum=momentum, **options),
        torch.nn.Linear(8, 3),
    )


def inputs_of_norm(model, rows):
    return model[0](BATCH[0][rows]).detach()


def moved(mean, x, share):
    return (1 - share) * mean + share * x.mean(0)


def attributes(model):
    norm = model[1]
    return norm.momentum, norm.track_running_stats, norm.training


class Shortage:
    """A loss function that runs out of memory in the forward of the second of `pieces` pieces, once."""

    def __init__(self, model, error=None):
        self.model, self.error, self.calls, self.seen = model, error, 0, []

    def __call__(self, model, piece):
        self.calls += 1
        self.seen.append(attributes(self.model))
        loss = cross_entropy(model, piece)
        if self.calls == 2:
            raise self.error or torch.OutOfMemoryError("planted")
        return loss


def test_one_warning_names_the_modules_at_the_first_step_that_is_split(caplog):
    model = torch.nn.Sequential(net(), torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3).eval())
    sizer = brimful.BatchSizer(model)
    with caplog.at_level(logging.WARNING, "brimful"):
        sizer.step(BATCH, cross_entropy)
        assert not caplog.records
        for _ in range(2):
            model.zero_grad()
            sizer.step(BATCH, cross_entropy, split=[4, 8])
    assert len(caplog.records) == 1
    assert "(modules: 0.1, 1); choose batch_norm=" in caplog.text
    assert attributes(model[0]) == (0.1, True, True)


@pytest.mark.parametrize("policy", ["freeze", "rescale", "refuse"])
def test_other_policies_do_not_warn(caplog, policy):
    with caplog.at_level(logging.WARNING, "brimful"):
        brimful.BatchSizer(net().eval(), batch_norm=policy).step(BATCH, cross_entropy, split=[4, 8])
    assert not caplog.records


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_frozen_statistics_are_those_of_the_first_piece(momentum):
    model, alone = net(momentum), net(momentum)
    for _ in range(2):
        model.zero_grad()
        sizer = brimful.BatchSizer(model, batch_norm="freeze")
        sizer.step(BATCH, cross_entropy, split=[5, 3, 4])
        alone(BATCH[0][:5])
    assert same_bits(values_of(model), values_of(alone))
    assert attributes(model) == (momentum, True, True)
    assert model[1].num_batches_tracked == 2


def test_frozen_pieces_are_normalised_by_themselves():
    """The gradient is that of the pieces without a policy."""
    model, plain = net(), net()
    brimful.BatchSizer(model, batch_norm="freeze").step(BATCH, cross_entropy, split=[5, 7])
    brimful.BatchSizer(plain).step(BATCH, cross_entropy, split=[5, 7])
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert not torch.equal(model[1].running_mean, plain[1].running_mean)


@pytest.mark.parametrize("pieces", [2, 3, 4])
@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0])
def test_rescaled_pieces_move_the_statistics_as_far_as_one_batch(pieces, momentum):
    model = net(momentum)
    model[1].running_mean.fill_(7)
    expected = model[1].running_mean.double()
    share = 1 - (1 - momentum) ** (1 / pieces)
    for rows in torch.arange(ROWS).chunk(pieces):
        expected = moved(expected, inputs_of_norm(model, rows).double(), share)
    sizer = brimful.BatchSizer(model, pieces=pieces, batch_norm="rescale")
    outcome = sizer.step(BATCH, cross_entropy)
    assert outcome.pieces == pieces
    assert torch.allclose(model[1].running_mean.double(), expected, rtol=1e-5, atol=1e-6)
    assert model[1].num_batches_tracked == 1
    assert attributes(model) == (momentum, True, True)


def test_rescaled_pieces_of_a_cumulative_mean_are_parts_of_a_batch():
    model, whole = net(None), net(None)
    sizer = brimful.BatchSizer(model, pieces=3, batch_norm="rescale")
    for _ in range(3):
        model.zero_grad()
        sizer.step(BATCH, cross_entropy)
        whole(BATCH[0])
    # Pieces of equal size: the mean of their means is that of the batch. Their variances are not the batch's.
    assert torch.allclose(model[1].running_mean, whole[1].running_mean, rtol=1e-5, atol=1e-6)
    assert model[1].num_batches_tracked == whole[1].num_batches_tracked == 3
    variance = torch.stack([inputs_of_norm(model, r).var(0) for r in torch.arange(ROWS).chunk(3)])
    assert torch.allclose(model[1].running_var, variance.mean(0), rtol=1e-5)


@pytest.mark.parametrize("policy", ["freeze", "rescale"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_retry_and_an_error_leave_the_modules_as_they_were(policy, momentum):
    model, clean = net(momentum), net(momentum)
    shortage = Shortage(model)
    outcome = brimful.BatchSizer(model, pieces=2, batch_norm=policy).step(BATCH, shortage)
    assert (outcome.retries, outcome.pieces) == (1, 4)
    assert attributes(model) == (momentum, True, True)
    assert shortage.seen[0] != shortage.seen[1] or policy == "rescale"
    brimful.BatchSizer(clean, batch_norm=policy).step(BATCH, cross_entropy, split=outcome.split)
    assert same_bits(values_of(model), values_of(clean))

    before = values_of(model)
    model.zero_grad()
    sizer = brimful.BatchSizer(model, pieces=2, batch_norm=policy)
    error = raised(sizer.step, BATCH, Shortage(model, KeyError("planted")))
    assert type(error) is KeyError
    assert attributes(model) == (momentum, True, True)
    assert same_bits(values_of(model), before)


@pytest.mark.parametrize("policy", ["freeze", "rescale"])
def test_a_step_that_is_not_split_is_left_alone(policy):
    model, plain = net(), net()
    brimful.BatchSizer(model, batch_norm=policy).step(BATCH, cross_entropy)
    plain(BATCH[0])
    assert same_bits(values_of(model), values_of(plain))


def test_a_module_without_statistics_or_in_eval_has_none_to_change():
    for model in (net(track_running_stats=False), net().eval()):
        before = values_of(model), attributes(model)
        for policy in ("freeze", "rescale"):
            model.zero_grad()
            brimful.BatchSizer(model, pieces=2, batch_norm=policy).step(BATCH, cross_entropy)
        assert same_bits(values_of(model), before[0]) and attributes(model) == before[1]


def test_a_split_is_refused_before_anything_runs():
    model = net()
    before = values_of(model)

    def never(model, piece):
        raise AssertionError("it ran")

    sizer = brimful.BatchSizer(model, pieces=3, batch_norm="refuse")
    error = raised(sizer.step, BATCH, never)
    assert type(error) is ValueError
    assert "(batch_norm: refuse, pieces: 3, BatchNorm modules: 1); give" in str(error)
    assert same_bits(values_of(model), before)
    assert sizer.step(BATCH, cross_entropy, split=[ROWS]).pieces == 1
    model.zero_grad()
    model.eval()
    assert sizer.step(BATCH, cross_entropy).pieces == 3


def test_a_batch_that_does_not_fit_whole_is_refused_without_a_second_try():
    model = net()
    calls = []

    def heavy(model, piece):
        calls.append(len(piece[0]))
        torch.empty(len(piece[0]), 1 << 16, dtype=torch.uint8).fill_(0)
        return cross_entropy(model, piece)

    before = values_of(model)
    sizer = brimful.BatchSizer(model, batch_norm="refuse")
    memory.set_limit("cpu", memory.stats("cpu").used_bytes + (ROWS << 15))
    error = raised(sizer.step, BATCH, heavy)
    memory.set_limit("cpu", None)
    assert isinstance(error, brimful.BatchTooLarge) and calls == [ROWS]
    assert "batch_norm: refuse" in str(error)
    assert same_bits(values_of(model), before)


def refused_job(rank):
    model = wrap(net())
    sizer = brimful.BatchSizer(model, pieces=1 + rank.index, batch_norm="refuse")
    error = raised(sizer.step, BATCH, cross_entropy)
    weight = sizer.step(BATCH, cross_entropy, split=[ROWS]).weight
    return error, weight


def test_a_refusal_of_one_rank_is_told_to_the_others(ranks):
    (first, weight), (second, _) = ranks(refused_job)
    assert type(first) is brimful.RankFailed and first.rank == 1
    assert type(second) is ValueError
    for error in (first, second):
        assert "BatchNorm modules: 1)" in str(error)
    assert weight == 2 * ROWS


def rescaled_job(rank):
    model = wrap(net())
    sizer = brimful.BatchSizer(model, pieces=1 + rank.index, batch_norm="rescale")
    sizer.step(BATCH, cross_entropy)
    return values_of(model), attributes(model.module)


def test_ranks_with_other_splits_keep_equal_buffers(ranks):
    (first, kept), (second, _) = ranks(rescaled_job)
    assert same_bits(first, second) and kept == (0.1, True, True)
    assert first["1.num_batches_tracked"] == 1


def test_an_unknown_policy_is_refused():
    error = raised(brimful.BatchSizer, net(), batch_norm="hope")
    assert type(error) is ValueError and '(batch_norm: hope); pass "warn"' in str(error)
