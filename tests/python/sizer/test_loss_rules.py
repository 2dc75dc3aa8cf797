"""loss_rule="find": pieces are weighted by the rule that the loss of a few rows was seen to follow."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference, rng_states, same_bits, seed, values_of, wrap

import brimful

IGNORED = -100


def net(dtype=torch.float32):
    seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(20, 12), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(12, 20)
    ).to(dtype)


def tokens(rows=8, length=10, alike=False):
    """Rows whose labels count unequally, unless ``alike``."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 20, (rows, length), generator=generator)
    labels = torch.randint(0, 20, (rows, length), generator=generator)
    for row in range(rows):
        labels[row, 3 if alike else 1 + row :] = IGNORED
    return {"input_ids": ids, "labels": labels}


def scores(model, piece):
    return model(piece["input_ids"]).flatten(0, 1)


def mean_over_labels(model, piece):
    return F.cross_entropy(scores(model, piece), piece["labels"].flatten())


def mean_over_next_labels(model, piece):
    out = model(piece["input_ids"])[:, :-1].flatten(0, 1)
    return F.cross_entropy(out, piece["labels"][:, 1:].flatten())


def mean_over_rows(model, piece):
    return F.cross_entropy(model(piece["input_ids"]).mean(1), piece["input_ids"][:, 0])


def sum_over_labels(model, piece):
    return F.cross_entropy(scores(model, piece), piece["labels"].flatten(), reduction="sum")


def contrastive(model, piece):
    out = F.normalize(model(piece["input_ids"]).mean(1))
    return F.cross_entropy(out @ out.T / 0.1, torch.arange(len(out)))


def only_in_training(model, piece):
    """As a detection model, which returns no loss in evaluation."""
    return mean_over_labels(model, piece) if model.training else None


def drawing(model, piece):
    """As a diffusion model, or a masked autoencoder: it draws in evaluation too."""
    noise = torch.randn(len(piece["labels"]), 1, 1) + torch.randint(0, 9, ()) * torch.rand(())
    return (model(piece["input_ids"]) * (1 + noise)).square().mean()


RULES = [
    (mean_over_labels, "labels"),
    (mean_over_next_labels, "labels, without the first"),
    (mean_over_rows, "rows"),
    (sum_over_labels, "sum"),
    (only_in_training, "labels"),
    (drawing, "rows"),
]


def whole(loss_fn, batch, dtype=torch.float32):
    module = net(dtype)
    module[1].p = 0.0
    torch.manual_seed(5)
    loss_fn(module, batch).backward()
    return gradients_of(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("loss_fn", "rule"), RULES)
def test_pieces_have_the_gradient_of_the_whole_by_the_rule_that_was_found(loss_fn, rule, dtype):
    batch, module = tokens(), net(dtype)
    module[1].p = 0.0
    sizer = brimful.BatchSizer(module, loss_rule="find", pieces=1 if loss_fn is drawing else 3)
    torch.manual_seed(5)
    sizer.step(batch, loss_fn)
    report = sizer.report()
    assert report.loss_rule == rule and f"rule of the loss: {rule}" in str(report)
    assert 0 < report.trial_runs <= 6 and report.trial_ms > 0
    tolerance = 1e-6 if dtype is torch.float32 else 1e-13
    assert relative_difference(gradients_of(module), whole(loss_fn, batch, dtype)) < tolerance
    module.zero_grad()
    sizer.step(batch, loss_fn)  # it is known now
    assert sizer.report().trial_runs == report.trial_runs


@pytest.mark.parametrize("columns", [False, True])
def test_where_counts_are_alike_the_choice_waits(columns):
    """Rules that agree so far give the same pieces; the next batch shows which it is."""
    module = net()
    module[1].p = 0.0

    def of(batch):
        return tuple(batch.values()) if columns else batch

    def loss_fn(model, piece):
        ids, labels = piece if columns else piece.values()
        return mean_over_labels(model, {"input_ids": ids, "labels": labels})

    sizer = brimful.BatchSizer(module, loss_rule="find", pieces=3)
    for alike in (True, True, False, False):
        module.zero_grad()
        batch = tokens(alike=alike)
        sizer.step(of(batch), loss_fn)
        assert relative_difference(gradients_of(module), whole(mean_over_labels, batch)) < 1e-6
    assert sizer.report().loss_rule == ("1" if columns else "labels")
    assert sizer.report().trial_runs <= 6


def test_a_loss_that_compares_rows_is_refused_with_distances_and_a_remedy():
    module = net()
    sizer = brimful.BatchSizer(module, loss_rule="find")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rows: 0\.\d+.*loss_rule='whole'.*pair_step"):
            sizer.step(tokens(), contrastive)
    kept = brimful.BatchSizer(module, loss_rule="whole", pieces=3)
    outcome = kept.step(tokens(), contrastive)
    assert outcome.pieces == 1
    assert kept.report().trial_runs == 0


def test_a_batch_that_stays_whole_is_not_split_where_memory_runs_out():
    def loss_fn(model, piece):
        if len(piece["labels"]) > 4:
            raise torch.OutOfMemoryError("planted")
        return contrastive(model, piece)

    sizer = brimful.BatchSizer(net(), loss_rule="whole", ladder="split")
    with pytest.raises(brimful.BatchTooLarge):
        sizer.step(tokens(), loss_fn)


def test_what_does_not_repeat_is_refused():
    calls = []

    def loss_fn(model, piece):
        calls.append(None)
        return mean_over_labels(model, piece) * len(calls)

    with pytest.raises(ValueError, match="another one when they run again"):
        brimful.BatchSizer(net(), loss_rule="find").step(tokens(), loss_fn)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_where_few_rows_fit_fewer_are_tried_or_their_losses_alone(rows):
    module = net()
    module[1].p = 0.0

    def loss_fn(model, piece):
        if torch.is_grad_enabled() and len(piece["labels"]) > rows:
            raise torch.OutOfMemoryError("planted")
        return sum_over_labels(model, piece)

    sizer = brimful.BatchSizer(module, loss_rule="find")
    sizer.step(tokens(), loss_fn)
    assert sizer.report().loss_rule == "sum"
    assert relative_difference(gradients_of(module), whole(sum_over_labels, tokens())) < 1e-6


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return x


def test_a_trial_leaves_everything_as_it_was():
    module = torch.nn.Sequential(*net(), Counting())
    module.train()
    batch, calls, states = tokens(), [], []
    for parameter in module.parameters():
        parameter.register_hook(lambda _: calls.append("hook"))
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    before = {"values": values_of(module), "rng": rng_states()}
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    draws = []

    def loss_fn(model, piece):
        if not states:
            states.append(None)
            draws.append((random.random(), numpy.random.rand(), torch.rand(())))
        piece["input_ids"].remainder_(7)
        raise_after = model.training and states[-1] == "raise"
        if raise_after:
            raise KeyError("the step itself")
        return mean_over_labels(model, piece)

    sizer = brimful.BatchSizer(module, loss_rule="find")
    rules = sizer._rule_of(batch, loss_fn)
    assert rules.vote.knows and calls == [] and draws
    assert same_bits(before["values"], values_of(module)) and module.training
    assert str(before["rng"]) == str(rng_states())
    assert all(torch.equal(copies[name], tensor) for name, tensor in batch.items())
    assert all(p.grad is None for p in module.parameters())
    assert all(len(p._backward_hooks) == 1 for p in module.parameters())


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(ValueError, match="weight_fn: given"):
        brimful.BatchSizer(net(), loss_rule="find", weight_fn=len)
    with pytest.raises(ValueError, match="loss_rule is one of 'find', 'rows', 'sum', 'whole'"):
        brimful.BatchSizer(net(), loss_rule="mean")
    with pytest.raises(ValueError, match="leave loss_rule out"):
        sizer = brimful.BatchSizer(net(), loss_rule="rows")
        sizer.step(tokens(), lambda model, piece: (mean_over_labels(model, piece), 1.0))


def ranks_job(rank):
    """One rank has rows whose counts are alike, one a single row, one none: all take the rule that the last finds."""
    batches = [tokens(alike=True), {k: v[:1] for k, v in tokens().items()}, brimful.NO_DATA]
    batches.append({k: v[4:] for k, v in tokens().items()})
    module = net()
    module[1].p = 0.0
    sizer = brimful.BatchSizer(wrap(module), loss_rule="find", pieces=1)
    batch = batches[rank.index]
    sizer.step(batch, mean_over_labels, split=None)
    every = [b for b in batches if b is not brimful.NO_DATA]
    joined = {k: torch.cat([b[k] for b in every]) for k in every[0]}
    assert relative_difference(gradients_of(module), whole(mean_over_labels, joined)) < 1e-5
    return sizer.report().loss_rule


def test_ranks_take_one_rule_in_one_step(ranks):
    found = ranks(ranks_job, size=4)
    assert found == ["labels", "labels", "", "labels"]


def excluding_job(rank):
    """What two ranks see excludes each other."""
    loss_fn = (mean_over_labels, sum_over_labels)[rank.index]
    sizer = brimful.BatchSizer(wrap(net()), loss_rule="find")
    with pytest.raises(ValueError, match="composed by different rules"):
        sizer.step(tokens(), loss_fn)


def refusing_job(rank):
    """One rank refuses its batch, and the other is informed."""
    loss_fn = (mean_over_labels, contrastive)[rank.index]
    sizer = brimful.BatchSizer(wrap(net()), loss_rule="find")
    with pytest.raises((brimful.RankFailed, ValueError)) as raised:
        sizer.step(tokens(), loss_fn)
    return type(raised.value).__name__


def test_ranks_that_cannot_agree_all_raise(ranks):
    ranks(excluding_job)
    assert ranks(refusing_job) == ["RankFailed", "ValueError"]


def loop_job(rank):
    """In a loop over data of which each rank has another amount."""
    module = net()
    module[1].p = 0.0
    sizer = brimful.BatchSizer(wrap(module), loss_rule="find", pieces=2)
    steps = 0
    for batch in sizer.batches([tokens()] * (1 + rank.index)):
        sizer.step(batch, mean_over_labels)
        assert relative_difference(gradients_of(module), whole(mean_over_labels, tokens())) < 1e-5
        module.zero_grad()
        steps += 1
    return steps


def test_a_loop_over_unequal_data(ranks):
    assert ranks(loop_job) == [2, 2]
