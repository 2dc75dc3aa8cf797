"""Small models, data and comparisons that several test files use."""

import functools
import gc
import random

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F

import brimful


@functools.cache
def cpu_runs_half_lstm():
    """oneDNN has a bfloat16 LSTM for some processors alone."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.randn(2, 1, 4))
    except RuntimeError:
        return False
    return True


def seed(value):
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)


def used():
    """Bytes of the CPU that are in use, without garbage."""
    gc.collect()
    return brimful.memory.stats("cpu").used_bytes


def rng_states():
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()


def dropout_net():
    """Eight parameters, buffers that change, and random numbers of torch."""
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 3),
    )


def wrap(module, **options):
    """Small buckets: the first leave while backward still runs."""
    return brimful.DistributedDataParallel(module, **{"bucket_cap_mb": 0.0005, **options})


def classes(rows, features=6, count=3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator, dtype=dtype)
    return x, torch.randint(0, count, (rows,), generator=generator)


def cross_entropy(model, piece):
    return F.cross_entropy(model(piece[0]), piece[1])


def noisy_cross_entropy(model, piece):
    """Random numbers of Python and NumPy in the data path."""
    x = piece[0] * random.uniform(0.9, 1.1) + float(numpy.random.rand()) * 0.1
    return F.cross_entropy(model(x), piece[1])


class Words(torch.nn.Module):
    """An embedding with sparse gradients among dense layers."""

    def __init__(self, sparse_last):
        super().__init__()
        torch.manual_seed(1)
        if not sparse_last:
            self.words = torch.nn.Embedding(30, 6, sparse=True)
        self.hidden = torch.nn.Linear(6, 6)
        self.scores = torch.nn.Linear(6, 3)
        if sparse_last:
            self.words = torch.nn.Embedding(30, 6, sparse=True)

    def forward(self, tokens):
        return self.scores(torch.tanh(self.hidden(self.words(tokens).mean(1))))


def words_batch(rows, number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 30, (rows, 4), generator=generator)
    return tokens, torch.randint(0, 3, (rows,), generator=generator)


def two_nets():
    torch.manual_seed(3)
    return [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)) for _ in range(2)]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SyncedNorm(torch.nn.SyncBatchNorm):
    """torch's class refuses CPU tensors: the same over gloo."""

    def forward(self, x):
        sums = SumOverRanks.apply(torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])]))
        count = sums[-1].detach()
        mean, square = sums[:-1].view(2, -1) / count
        variance = square - mean * mean
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.common = torch.nn.Linear(6, 8)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(3))
        self.branch = None  # all

    def forward(self, x):
        x = torch.tanh(self.common(x))
        if self.branch is not None:
            return self.branches[self.branch](x)
        return sum(branch(x) for branch in self.branches)


class FaultOnce:
    """Raises out-of-memory in the k-th gradient hook since it was armed."""

    def __init__(self, parameters):
        self.at = None
        self.fired = False
        for parameter in parameters:
            parameter.register_hook(self.on_gradient)

    def arm(self, at):
        self.at = at
        self.fired = False

    def on_gradient(self, _):
        if self.at is None:
            return
        if self.at == 0:
            self.at = None
            self.fired = True
            raise torch.OutOfMemoryError("planted")
        self.at -= 1


def values_of(module):
    """Copies of all parameters and buffers by name."""
    module = getattr(module, "module", module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def gradients_of(module):
    module = getattr(module, "module", module)
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }


def same_bits(first, second):
    """True if two dicts of tensors (or None) are equal to the bit."""
    return list(first) == list(second) and all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(first.values(), second.values(), strict=True)
    )


def relative_difference(first, second):
    """The largest difference of two dicts of tensors, relative to the largest value of each tensor."""
    assert list(first) == list(second)
    worst = 0.0
    for name in first:
        a, b = (t.to_dense().double() for t in (first[name], second[name]))
        size = b.abs().max().item()
        worst = max(worst, (a - b).abs().max().item() / (size if size > 0 else 1.0))
    return worst


def require_equal_replicas(*modules):
    mine = [values_of(module) for module in modules]
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    for other in everybody:
        assert all(same_bits(a, b) for a, b in zip(mine, other, strict=True))


def recomputed_stages(outcome):
    """The numbers of the stages that ran their forward again."""
    return [number for number, stage in enumerate(outcome.stages) if stage.recomputed]
