"""Combinations in which a sum was, or could be, silently wrong."""

import copy
import logging

import pytest
import torch
from models import classes, cross_entropy, gradients_of, relative_difference, same_bits
from test_direct import WIDTH, Net, batch, loss_of, mean_gradients
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import brimful


def small_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 20), torch.nn.Linear(20, 3)
    )


def join_job(rank, steps):
    """Ranks without data add nothing to large gradients, however many of their steps others make."""
    module = Net()
    model = brimful.DistributedDataParallel(copy.deepcopy(module))
    with model.join():
        for step in range(steps[rank.index]):
            model.zero_grad()
            loss_of(model, batch(10 * rank.index + step)).backward()
            there = [r for r in range(rank.size) if step < steps[r]]
            expected = mean_gradients(module, [batch(10 * r + step) for r in there])
            share = len(there) / rank.size
            mine = gradients_of(model)
            for name in ("first.weight", "second.weight", "first.bias"):
                difference = relative_difference(
                    {"": mine[name]}, {"": expected[name].double() * share}
                )
                assert difference < 2e-6, (step, name, difference)


@pytest.mark.parametrize("steps", [(1, 4), (3, 1)])
def test_a_joined_rank_adds_nothing_to_large_gradients(ranks, steps):
    ranks(join_job, steps)


def hook_predivide_job(rank, factor):
    gradients = []
    for hooked in (False, True):
        model = brimful.DistributedDataParallel(
            small_net(), bucket_cap_mb=0.0001, gradient_predivide_factor=factor
        )
        if hooked:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        cross_entropy(model, classes(8, seed=rank.index)).backward()
        gradients.append(gradients_of(model))
    return relative_difference(*gradients)


@pytest.mark.parametrize("factor", [None, 1.0, 3.0])
def test_a_hook_and_predivision(ranks, factor):
    assert max(ranks(hook_predivide_job, factor)) < 1e-6


class Branches(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(1)
        self.always = torch.nn.Linear(width, width)
        self.sometimes = torch.nn.Linear(width, width)

    def forward(self, x, use):
        y = self.always(x)
        return self.sometimes(y) if use else y


def thrown_away_job(rank, width):
    """Gradients of a backward that did not synchronise, thrown away: they leave no trace in what counts as used."""
    model = brimful.DistributedDataParallel(Branches(width))
    x = torch.ones(2, width) * (rank.index + 1)
    with model.no_sync():
        model(x, True).sum().backward()
    model.zero_grad()
    model(x, rank.index == 1).sum().backward()
    used = gradients_of(model)
    model.zero_grad()
    with model.no_sync():
        model(x, True).sum().backward()
    model.zero_grad()
    model(x, False).sum().backward()
    unused = gradients_of(model)
    assert used["sometimes.weight"] is not None and used["sometimes.bias"] is not None
    assert unused["sometimes.weight"] is None and unused["sometimes.bias"] is None
    return used


@pytest.mark.parametrize("width", [8, WIDTH])
def test_what_was_thrown_away_does_not_count_as_used(ranks, width):
    first, second = ranks(thrown_away_job, width)
    assert same_bits(first, second)


def two_forwards_job(rank, failing):
    """The first of two backwards dies on one rank and is caught: the second is in step with the other rank's."""
    model = brimful.DistributedDataParallel(small_net(), bucket_cap_mb=0.0001)
    clean = brimful.DistributedDataParallel(small_net(), bucket_cap_mb=0.0001)
    batches = [classes(8, seed=10 * rank.index + i) for i in range(3)]
    for _ in range(3):
        first, second = (cross_entropy(model, b) for b in batches[:2])
        if rank.index == failing:
            handle = model.module[0].weight.register_hook(fail)
        with pytest.raises((RuntimeError, brimful.RankFailed)):
            first.backward()
        if rank.index == failing:
            handle.remove()
        model.zero_grad(set_to_none=True) if rank.index != failing else None
        for p in model.parameters():
            p.grad = None
        second.backward()
        cross_entropy(clean, batches[1]).backward()
        assert same_bits(gradients_of(model), gradients_of(clean))
        for m in (model, clean):
            m.zero_grad()


def fail(gradient):
    raise RuntimeError("planted")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_second_backward_after_one_that_died_is_in_step(ranks, failing):
    ranks(two_forwards_job, failing)


def feedback_job(rank, factor, feedback=True):
    module = small_net()
    batches = [classes(8, seed=r) for r in range(rank.size)]
    reference = copy.deepcopy(module).double()
    sum(cross_entropy(reference, (x.double(), y)) / rank.size for x, y in batches).backward()
    model = brimful.DistributedDataParallel(
        module,
        bucket_cap_mb=0.0001,
        wire_dtype=torch.bfloat16,
        error_feedback=feedback,
        gradient_predivide_factor=factor,
        plan="registration",
    )
    steps = 60
    sums = {name: torch.zeros_like(g) for name, g in gradients_of(reference).items()}
    for _ in range(steps):
        cross_entropy(model, batches[rank.index]).backward()
        for name, gradient in gradients_of(model).items():
            sums[name] += gradient
        model.zero_grad()
    means = {name: s / steps for name, s in sums.items()}
    return relative_difference(means, gradients_of(reference))


def test_predivision_leaves_error_feedback_whole(ranks):
    # Factors that are powers of two: what is rounded away, and so what comes back, is the same to the bit.
    assert len({d for factor in (None, 1.0, 8.0) for d in ranks(feedback_job, factor)}) == 1
    assert ranks(feedback_job, None)[0] < 0.7 * ranks(feedback_job, None, False)[0]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def log_job(rank):
    lines = Lines()
    logging.getLogger("brimful").addHandler(lines)
    logging.getLogger("brimful").setLevel(logging.INFO)
    torch.manual_seed(0)
    model = brimful.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(600, 600, bias=False) for _ in range(5)))
    )
    for _ in range(110):
        model(torch.ones(1, 600)).sum().backward()
        model.zero_grad()
    return len([line for line in lines.lines if "bucket sizes tuned" in line])


def test_tuned_sizes_are_told_once(ranks):
    assert ranks(log_job) == [1, 0]


def last_node_job(rank, failing):
    """Memory runs out behind the last gradient, and a hook's future fails while the rest is completed: nobody hangs."""
    spoiled = [False]

    def hook(state, bucket):
        future = default_hooks.allreduce_hook(None, bucket)

        def broken(f):
            if spoiled[0] and bucket.index() == 0:
                raise RuntimeError("planted in the future")
            return f.value()

        return future.then(broken)

    model = brimful.DistributedDataParallel(small_net(), bucket_cap_mb=0.0001)
    model.register_comm_hook(None, hook)
    sizer = brimful.BatchSizer(model)
    x, y = classes(8, seed=rank.index)

    def loss_fn(model, piece):
        leaf = piece[0].clone().requires_grad_()
        if spoiled[0]:
            leaf.register_hook(run_out)  # its node runs behind the first layer's gradients
        return cross_entropy(model, (leaf * 1, piece[1]))

    sizer.step((x, y), loss_fn)
    model.zero_grad()
    spoiled[0] = rank.index == failing
    with pytest.raises((RuntimeError, brimful.RankFailed), match="planted in the future"):
        sizer.step((x, y), loss_fn)
    spoiled[0] = False
    sizer.step((x, y), loss_fn)


def run_out(gradient):
    raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_hook_that_fails_while_the_step_stands(ranks, failing):
    ranks(last_node_job, failing)
