"""Communication hooks, predivision and error feedback together; a hook that fails while the step stands."""

import copy

import pytest
import torch
from models import (
    classes,
    cross_entropy,
    gradients_of,
    relative_difference,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import brimful


def small_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 20), torch.nn.Linear(20, 3)
    )


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
