"""What a sizer does about BatchNorm when it splits a batch."""

import logging

import pytest
import torch
from models import classes, cross_entropy, same_bits, values_of, wrap
from rank_processes import raised
from torch.utils.checkpoint import checkpoint

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
    assert "(modules: 0.1, 1); use GroupNorm, or batch_norm=" in caplog.text
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


def assert_moved_as_by(whole, model):
    """Statistics of the norms are equal: those of one forward over the whole batch."""
    assert whole.keys() == model.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(model[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("split", [[6, 6], [5, 3, 4], [2, 8, 2], [3, 3, 3, 3]])
@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0, 0.0, None])
def test_rescaled_pieces_move_the_statistics_as_the_whole_batch_does(split, momentum):
    model, whole = net(momentum), net(momentum)
    sizer = brimful.BatchSizer(model, batch_norm="rescale")
    for _ in range(3):
        model.zero_grad()
        sizer.step(BATCH, cross_entropy, split=split)
        whole(BATCH[0])
        assert_moved_as_by(statistics(whole), statistics(model))
        assert model[1].num_batches_tracked == whole[1].num_batches_tracked
    assert attributes(model) == (momentum, True, True)


class Images(torch.nn.Module):
    """A norm of images, called twice, and one of which some are frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.BatchNorm2d(3, momentum=0.3)
        self.frozen = torch.nn.BatchNorm2d(3).eval()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.drawn = torch.randn(ROWS, 3, 4, 5) * torch.arange(1, ROWS + 1)[:, None, None, None]

    def forward(self, rows):
        x = self.drawn[rows] * self.scale
        first = self.norm(x).mean()
        return first + self.norm(x.detach() + 5).mean() + self.frozen(x).square().mean()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_and_a_module_that_is_called_twice(memory_format):
    model, whole = Images(), Images()
    for each in (model, whole):
        each.drawn = each.drawn.to(memory_format=memory_format)
    sizer = brimful.BatchSizer(model, batch_norm="rescale")
    sizer.step(torch.arange(ROWS), lambda model, rows: model(rows), split=[7, 2, 3])
    whole(torch.arange(ROWS))
    assert_moved_as_by(statistics(whole), statistics(model))
    assert model.norm.num_batches_tracked == 2


@pytest.mark.parametrize("policy", ["freeze", "rescale"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activations_that_are_computed_again_do_not_count_again(policy, use_reentrant):
    model, whole = net(), net()
    inner = torch.nn.Sequential(model[0], model[1])

    def checkpointed(model, piece):
        rows = piece[0].requires_grad_(use_reentrant)
        hidden = checkpoint(inner, rows, use_reentrant=use_reentrant)
        return torch.nn.functional.cross_entropy(model[2](hidden), piece[1])

    batch = BATCH[0].clone(), BATCH[1]
    brimful.BatchSizer(model, batch_norm=policy).step(batch, checkpointed, split=[5, 7])
    whole(BATCH[0][: 5 if policy == "freeze" else None])
    assert_moved_as_by(statistics(whole), statistics(model))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_compiled_module_moves_its_statistics_by_a_share_for_each_piece(momentum, fresh_compiler):
    """Its batch_norm cannot be seen."""
    model = net(momentum)
    model[1].running_mean.fill_(7)
    expected = model[1].running_mean.double()
    for index, rows in enumerate(torch.arange(ROWS).chunk(3)):
        share = 1 / (index + 1) if momentum is None else 1 - (1 - momentum) ** (1 / 3)
        expected = moved(expected, inputs_of_norm(model, rows).double(), share)
    compiled = torch.compile(model, backend="aot_eager")
    brimful.BatchSizer(compiled, pieces=3, batch_norm="rescale").step(BATCH, cross_entropy)
    assert torch.allclose(model[1].running_mean.double(), expected, rtol=1e-5, atol=1e-6)
    assert model[1].num_batches_tracked == 1
    assert attributes(model) == (momentum, True, True)


def test_an_error_in_the_last_backward_leaves_no_statistics():
    model = net()
    before = values_of(model)
    backwards = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            backwards.append(1)
            if len(backwards) == 2:
                raise KeyError("planted")
            return gradient

    sizer = brimful.BatchSizer(model, pieces=2, batch_norm="rescale")
    error = raised(sizer.step, BATCH, lambda m, piece: Fails.apply(cross_entropy(m, piece)))
    assert type(error) is KeyError
    assert same_bits(values_of(model), before)
    assert attributes(model) == (0.1, True, True)


@pytest.mark.parametrize("policy", ["freeze", "rescale"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_retry_and_an_error_leave_the_modules_as_they_were(policy, momentum):
    model, clean = net(momentum), net(momentum)
    shortage = Shortage(model)
    outcome = brimful.BatchSizer(model, pieces=2, batch_norm=policy).step(BATCH, shortage)
    assert (outcome.retries, outcome.pieces) == (1, 4)
    assert attributes(model) == (momentum, True, True)
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
    sizer = brimful.BatchSizer(model, batch_norm="refuse", ladder="split")
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


def test_a_refusal_of_one_rank_is_reported_to_the_others(ranks):
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
    whole = net()
    whole(BATCH[0])
    assert_moved_as_by(statistics(whole), {name: second[name] for name in statistics(whole)})


def test_an_unknown_policy_is_refused():
    error = raised(brimful.BatchSizer, net(), batch_norm="hope")
    assert type(error) is ValueError and '(batch_norm: hope); pass "warn"' in str(error)


class OwnNorm(torch.nn.Module):
    """Normalises over rows and keeps running statistics, and is of no class of torch's."""

    def __init__(self, how="copies"):
        super().__init__()
        self.how = how
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))

    def forward(self, x):
        mean, variance = x.mean(0), x.var(0)
        if self.training and self.how == "copies":
            self.running_mean.copy_(self.running_mean.lerp(mean.detach(), 0.1))
        elif self.training and self.how == "assigns":
            self.running_mean = self.running_mean.lerp(mean.detach(), 0.1)
        elif self.training and self.how == "calls torch":
            statistics = self.running_mean, self.running_var
            return torch.nn.functional.batch_norm(x, *statistics, training=True)
        return (x - mean) / variance.sqrt()


class Codebook(torch.nn.Module):
    """Counts which of its codes rows are near to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cluster_size", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.cluster_size.mul_(0.9).add_(x.argmax(1).bincount(minlength=8))
        return x


# Modules of other classes that keep statistics of what they saw
KEEPING = {
    "copies": lambda: OwnNorm("copies"),
    "assigns": lambda: OwnNorm("assigns"),
    "calls torch": lambda: OwnNorm("calls torch"),
    "instances": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 4)),
        torch.nn.InstanceNorm1d(2, track_running_stats=True),
        torch.nn.Flatten(),
    ),
    "a codebook": Codebook,
}
# Those that do not, though their buffers are called so
NOT_KEEPING = {
    "frozen": lambda: OwnNorm("is frozen"),
    "in eval": lambda: OwnNorm("copies").eval(),
}


def net_with(middle):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), middle, torch.nn.Linear(8, 3))


@pytest.mark.parametrize("whole_first", [False, True])
@pytest.mark.parametrize("name", KEEPING)
def test_modules_of_other_classes_that_keep_statistics_are_refused(name, whole_first):
    model = net_with(KEEPING[name]())
    sizer = brimful.BatchSizer(model, batch_norm="refuse")
    if whole_first:
        assert sizer.step(BATCH, cross_entropy).split == [ROWS]
        model.zero_grad()
    before = values_of(model)
    with pytest.raises(ValueError, match=r"refuse, .*keep running statistics: 1[.1]*\)"):
        sizer.step(BATCH, cross_entropy, split=[4, 8])
    assert same_bits(values_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert sizer.step(BATCH, cross_entropy).split == [ROWS]


@pytest.mark.parametrize("policy", ["warn", "freeze", "rescale"])
@pytest.mark.parametrize("name", KEEPING)
def test_modules_of_other_classes_that_keep_statistics_are_named_once(caplog, name, policy):
    model = net_with(KEEPING[name]())
    sizer = brimful.BatchSizer(model, batch_norm=policy)
    with caplog.at_level(logging.WARNING, "brimful"):
        sizer.step(BATCH, cross_entropy)
        assert not caplog.records
        for _ in range(2):
            model.zero_grad()
            sizer.step(BATCH, cross_entropy, split=[4, 8])
    assert len(caplog.records) == 1
    assert "(modules: 1" in caplog.text and "running statistics" in caplog.text


@pytest.mark.parametrize("policy", ["warn", "refuse"])
@pytest.mark.parametrize("name", NOT_KEEPING)
def test_modules_that_keep_no_statistics_are_left_alone(caplog, name, policy):
    model = net_with(NOT_KEEPING[name]())
    sizer = brimful.BatchSizer(model, batch_norm=policy)
    with caplog.at_level(logging.WARNING, "brimful"):
        for _ in range(6):
            sizer.step(BATCH, cross_entropy, split=[4, 8])
            model.zero_grad()
    assert not caplog.records


def test_a_pipelines_stage_that_keeps_statistics_is_refused():
    model = net_with(OwnNorm())
    pipeline = brimful.Pipeline(
        [model[0], model[1:]],
        loss_fn=torch.nn.functional.cross_entropy,
        batch_norm="refuse",
        microbatches=2,
    )
    with pytest.raises(ValueError, match="keep running statistics"):
        pipeline.step(*BATCH)
