"""What gradients must be: the mean of what each rank gets alone, and how to compare with it."""

import copy

import torch
import torch.distributed as dist
from models import classes, gradients_of, relative_difference

import brimful

DOUBLE = torch.float64
SMALL_BUCKETS_MB = 0.0001  # a bucket for every parameter or two


def wrap(module, **options):
    return brimful.DistributedDataParallel(module, **{"bucket_cap_mb": SMALL_BUCKETS_MB, **options})


def small_net(dtype=DOUBLE):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(
        dtype
    )


def batch_of(rank, step=0, dtype=DOUBLE):
    """Ranks have different numbers of samples."""
    return classes(5 + rank, seed=10 * step + rank, dtype=dtype)


def mean_gradients(module, size, train):
    """Gradients after train(copy of module, rank), averaged over the ranks; None where no rank has one."""
    total = {}
    for rank in range(size):
        replica = copy.deepcopy(module)
        train(replica, rank)
        for name, gradient in gradients_of(replica).items():
            if gradient is not None:
                gradient = gradient.to_dense() / size
                total[name] = total[name] + gradient if name in total else gradient
    return {name: total.get(name) for name, _ in module.named_parameters()}


def require_gradients(model, expected, tolerance=1e-12):
    actual = gradients_of(model)
    assert [n for n, g in actual.items() if g is None] == [
        n for n, g in expected.items() if g is None
    ]
    actual, expected = (
        {n: g for n, g in found.items() if g is not None} for found in (actual, expected)
    )
    assert relative_difference(actual, expected) <= tolerance


def require_same_everywhere(rank, tensors):
    """Every rank has the same bits."""
    found = [None] * rank.size
    dist.all_gather_object(found, {name: t.detach() for name, t in tensors.items()})
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(tensor, other[name]), name


def train_once(module, rank, step=0):
    x, y = batch_of(rank, step)
    torch.nn.functional.cross_entropy(module(x), y).backward()
