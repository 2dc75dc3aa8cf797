"""Buffers agree after a step and never change under autograd's feet: GANs, SyncBatchNorm, buffers that are replaced."""

import logging

import pytest
import torch
import torch.nn.functional as F
from ddp_reference import require_same_everywhere, wrap
from models import SyncedNorm, relative_difference, values_of
from rank_processes import raised
from torch.nn.parallel import DistributedDataParallel

import brimful


def noise(rank, step, rows=6, features=4):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(rows, features, generator=generator, dtype=torch.float64)


def discriminator():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.LeakyReLU(), torch.nn.Linear(8, 1)
    ).double()


def generator():
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    ).double()


def two_forwards_job(rank):
    """pytorch #175024: forward on fake, forward on real, one backward."""
    model = wrap(discriminator())
    errors = []
    for step in range(2):
        fake, real = model(noise(rank.index, step)), model(noise(rank.index, 50 + step))
        errors.append(raised((fake.mean() - real.mean()).backward))
        model.zero_grad()
    return errors, {n: b.clone() for n, b in model.module.named_buffers()}


def alone_buffers(steps):
    """Buffers of rank 0 when it runs by itself."""
    net = discriminator()
    for step in range(steps):
        net(noise(0, step)), net(noise(0, 50 + step))
    return dict(net.named_buffers())


def test_two_forwards_before_one_backward_work(ranks):
    for errors, buffers in ranks(two_forwards_job):
        assert errors == [None, None]
        assert relative_difference(buffers, alone_buffers(2)) < 1e-14


class Normaliser(torch.nn.Module):
    """A running scale that the forward replaces, and that its graph holds."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        self.scale = 0.5 * self.scale + 0.5 * x.abs().mean(0)
        return (x * self.weight * self.scale).sum()


def held_buffer_job(rank, wrapper):
    """How far the gradient of two forwards and one backward is from the mean of what ranks get alone."""
    expected = 0
    for r in range(rank.size):
        alone = Normaliser()
        (alone(noise(r, 0)) + alone(noise(r, 1))).backward()
        expected = expected + alone.weight.grad / rank.size
    model = (DistributedDataParallel if wrapper == "torch" else wrap)(Normaliser())
    (model(noise(rank.index, 0)) + model(noise(rank.index, 1))).backward()
    return (model.module.weight.grad - expected).abs().max().item()


def test_a_buffer_that_a_graph_holds_is_not_overwritten_before_its_backward(ranks):
    assert max(ranks(held_buffer_job, "ours")) < 1e-12
    # torch's class makes buffers equal in the second forward, and does not inform autograd.
    assert max(ranks(held_buffer_job, "torch")) > 1e-3


def gan_steps(g, d, batches, steps=3):
    """Alternates the two: d on a detached fake and on a real batch, g through d."""
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (d, g)]
    for step in range(steps):
        losses = []
        for rank in batches:
            fake = g(noise(rank, step))
            losses.append(
                F.softplus(d(fake.detach())).mean() + F.softplus(-d(noise(rank, 50 + step))).mean()
            )
        (sum(losses) / len(losses)).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        losses = [F.softplus(-d(g(noise(rank, 90 + step)))).mean() for rank in batches]
        (sum(losses) / len(losses)).backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def gan_job(rank):
    g, d = wrap(generator()), wrap(discriminator())
    gan_steps(g, d, [rank.index])
    for name, model in (("g", g), ("d", d)):
        require_same_everywhere(rank, {name + n: v for n, v in values_of(model).items()})
    expected = generator(), discriminator()
    gan_steps(*expected, range(rank.size))
    for model, alone in zip((g, d), expected, strict=True):
        ours, theirs = (
            {n: p.detach() for n, p in net.named_parameters() if n != "0.bias"}
            for net in (model.module, alone)
        )
        assert relative_difference(ours, theirs) < 1e-12


def test_two_wrapped_modules_train_a_gan(ranks):
    ranks(gan_job)


def synced_net(norm):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), norm(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    ).double()


def synced_job(rank):
    model, alone = wrap(synced_net(SyncedNorm)), synced_net(torch.nn.BatchNorm1d)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone)]
    for step in range(3):
        model(noise(rank.index, step)).square().mean().backward()
        alone(torch.cat([noise(r, step) for r in range(rank.size)])).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = (
        {
            n: v.double()
            for n, v in net.state_dict().items()
            if n != "1.num_batches_tracked" and n != "0.bias"
        }
        for net in (model.module, alone)
    )
    assert relative_difference(ours, theirs) < 1e-10


def test_a_norm_over_all_ranks_trains_as_one_process_in_a_plain_loop(ranks):
    ranks(synced_job)


class Codebook(torch.nn.Module):
    """Moving averages that the forward replaces instead of changing."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("average", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        self.count = self.count + 1
        return (x * self.weight).sum() + 0 * self.average.sum()


def replaced_job(rank, wrapper):
    model = (DistributedDataParallel if wrapper == "torch" else wrap)(Codebook())
    for step in range(3):
        model(noise(rank.index, step)).backward()
        model.zero_grad()
    if wrapper == "torch":
        with torch.no_grad():
            model(noise(0, 9))  # torch's class makes buffers equal before a forward
    else:
        require_same_everywhere(rank, dict(model.module.named_buffers()))
        with torch.no_grad():
            model(noise(0, 9))
    return model.module.average.tolist(), model.module.count.item()


def test_buffers_that_a_forward_replaces_agree_as_with_torchs_class(ranks):
    ours, theirs = ranks(replaced_job, "ours"), ranks(replaced_job, "torch")
    assert ours[0] == ours[1] == theirs[0] == theirs[1]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Cache(torch.nn.Module):
    """A cache that grows with the longest input, as rotary embeddings have."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if len(x) > len(self.cache):
            self.cache = torch.ones(len(x), dtype=torch.float64)
        self.count = self.count + len(x)
        return (self.cache[: len(x)] @ x * self.weight).sum()


def grown_job(rank):
    lines = Lines()
    logging.getLogger("brimful").addHandler(lines)
    model = wrap(Cache())
    for step, rows in enumerate((2, 5, 6, 3)):
        model(noise(rank.index, step, rows)).backward()
        mean = sum(noise(r, step, rows) for r in range(rank.size)) / rank.size
        expected = model.module.cache[:rows] @ mean
        assert torch.allclose(model.module.weight.grad, expected, rtol=1e-12)
        model.zero_grad()
    assert len(model.module.cache) == 6 and model.module.count.item() == 16
    return [line for line in lines.lines if "buffer" in line]


def test_a_buffer_that_changes_its_shape_is_named_and_left_alone(ranks):
    for lines in ranks(grown_job):
        assert len(lines) == 1 and "(name: cache)" in lines[0], lines


class Observed(torch.nn.Module):
    """Resizes a buffer in place in its first forward, as torch's per-channel observers do; it may be empty before."""

    def __init__(self, first, grows):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("low", torch.zeros(first))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.grows = grows

    def forward(self, x):
        with torch.no_grad():
            size = len(x) if self.grows else 4
            if len(self.low) != size:
                self.low.resize_(size).fill_(0)
            self.low += x.sum().float()
            self.steps += 1
        return (x * self.weight).sum()


def resized_job(rank, first, grows, sizer, rows):
    lines = Lines()
    logging.getLogger("brimful").addHandler(lines)
    model = wrap(Observed(first, grows))
    sizer = brimful.BatchSizer(model) if sizer else None
    lows = []
    for step, count in enumerate(rows):
        x = noise(rank.index, step, count)
        if sizer is None:
            model(x).backward()
        else:
            sizer.step(x, lambda model, piece: model(piece) / len(piece))
        mean = sum(noise(r, step, count) for r in range(rank.size)).sum(0) / rank.size
        expected = mean / (1 if sizer is None else count)
        assert torch.allclose(model.module.weight.grad, expected, rtol=1e-12)
        model.zero_grad()
        lows.append(model.module.low.tolist())
    assert model.module.steps.item() == len(rows)
    return lows, [line for line in lines.lines if "buffer" in line]


@pytest.mark.parametrize("sizer", [False, True])
@pytest.mark.parametrize("first", [0, 1, 6])
def test_a_buffer_that_is_resized_in_place_is_equal_on_all_ranks_from_the_next_step_on(
    ranks, first, sizer
):
    (zero, lines), (one, others) = ranks(resized_job, first, False, sizer, [3] * 5)
    assert zero[0] != one[0] and zero[1:] == one[1:]
    assert lines == others == []


def test_a_buffer_whose_size_varies_all_the_time_is_named_in_the_end(ranks):
    for lows, lines in ranks(resized_job, 1, True, False, [2, 3] * 6):
        assert [len(low) for low in lows] == [2, 3] * 6
        assert len(lines) == 1 and "(buffer: 0, size: [" in lines[0], lines


def resized_by_one_job(rank):
    """Sizes that the ranks never share: the others' buffers, and gradients, are right."""
    model = wrap(Observed(1, False))
    model.module.low.resize_(1 + rank.index)
    model.module.grows = True
    for step in range(3):
        model(noise(rank.index, step, 2 + rank.index)).backward()
        model.zero_grad()
    return len(model.module.low), model.module.steps.item()


def test_sizes_that_differ_between_the_ranks_stay_so(ranks):
    assert ranks(resized_by_one_job) == [(2, 3), (3, 3)]


class Marked(torch.nn.Module):
    """Has nothing but empty tensors beside what is trained."""

    def __init__(self, kind):
        super().__init__()
        self.inner = torch.nn.Linear(4, 2).double()
        if kind == "buffer":
            self.register_buffer("where", torch.empty(0), persistent=False)
        else:
            self.where = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x):
        return self.inner(x).sum() + self.where.sum()


def empty_job(rank, kind):
    model = wrap(Marked(kind))
    for step in range(2):
        model(noise(rank.index, step)).backward()
    mean = sum(noise(r, s) for r in range(rank.size) for s in range(2)).sum(0) / rank.size
    return torch.allclose(model.module.inner.weight.grad, mean.expand(2, 4), rtol=1e-12)


@pytest.mark.parametrize("kind", ["buffer", "frozen"])
def test_a_module_whose_buffers_or_frozen_parameters_are_empty_trains(ranks, kind):
    assert ranks(empty_job, kind) == [True, True]


def eval_job(rank):
    """Frozen statistics: nothing in a training step with BatchNorm in eval mode changes or diverges."""
    model = wrap(discriminator())
    model(noise(rank.index, 0)).sum().backward()
    model.zero_grad()
    before = {n: b.clone() for n, b in model.module.named_buffers()}
    model.eval()
    first, second = model(noise(rank.index, 1)).sum(), model(noise(rank.index, 2)).sum()
    first.backward()
    second.backward()
    assert relative_difference(dict(model.module.named_buffers()), before) == 0
    require_same_everywhere(rank, before)


def test_eval_mode_leaves_buffers_alone(ranks):
    ranks(eval_job)


def strayed_job(rank):
    """One rank validates in train mode; after the next step all agree again."""
    model = wrap(discriminator())
    if rank.index == 1:
        with torch.no_grad():
            model(noise(7, 7))
    model(noise(rank.index, 0)).sum().backward()
    require_same_everywhere(rank, dict(model.module.named_buffers()))


def test_buffers_of_a_rank_that_ran_a_forward_alone_come_back(ranks):
    ranks(strayed_job)
