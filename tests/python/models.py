"""Small models, data and comparisons that several test files use."""

import gc
import random

import numpy
import torch
import torch.nn.functional as F

import brimful


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
