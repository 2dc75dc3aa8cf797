"""Kinds of parameters: dtypes, layouts, tied, sparse, unused, frozen; and activation checkpointing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ddp_reference import (
    DOUBLE,
    mean_gradients,
    require_gradients,
    require_same_everywhere,
    small_net,
    train_once,
    wrap,
)
from models import gradients_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


def noise(rank, *shape, step=0, dtype=DOUBLE):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=dtype)


class Mixed(torch.nn.Module):
    """One parameter of each dtype; the loss is linear, so that every gradient is known to the bit."""

    DTYPES = (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype)) for dtype in self.DTYPES
        )

    def forward(self, rank):
        return sum(self.part(i, weight, rank) for i, weight in enumerate(self.weights))

    @staticmethod
    def part(i, weight, rank):
        factor = (torch.arange(6).view(3, 2) + i + rank).to(weight.dtype)
        product = (weight * factor * (1 + 1j if weight.is_complex() else 1)).sum()
        return (product.real if weight.is_complex() else product).double()


def mixed_job(rank):
    models = wrap(Mixed()), DistributedDataParallel(Mixed())
    for model in models:
        model(rank.index).backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert ours.grad.dtype == ours.dtype
        assert torch.equal(ours.grad, theirs.grad), ours.dtype
        expected = sum(
            (torch.arange(6).view(3, 2) + Mixed.DTYPES.index(ours.dtype) + r).to(ours.dtype)
            for r in range(rank.size)
        )
        # a complex gradient is the conjugate's
        assert torch.equal(ours.grad, expected / rank.size * (1 - 1j if ours.is_complex() else 1))


def test_every_dtype_is_averaged_as_it_is(ranks):
    ranks(mixed_job)


def layout_net():
    torch.manual_seed(4)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(4, 2, 3)
    ).double()
    return net.to(memory_format=torch.channels_last)


def layout_loss(model, rank):
    x = noise(rank, 2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    return (model(x) ** 2).mean()


def layout_job(rank):
    nets = [layout_net() for _ in range(rank.size)]
    for r, net in enumerate(nets):
        layout_loss(net, r).backward()
    model = wrap(layout_net())
    for _ in range(2):
        layout_loss(model, rank.index).backward()
        for parameter, *alone in zip(
            model.parameters(), *(net.parameters() for net in nets), strict=True
        ):
            assert parameter.grad.stride() == parameter.stride()
            assert torch.equal(parameter.grad, sum(p.grad * 0.5 for p in alone))
        model.zero_grad()


def test_channels_last_gradients_have_the_parameters_strides_and_are_exact(ranks):
    ranks(layout_job)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(7, 4)
        self.middle = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.middle

    def forward(self, tokens):
        return self.head(torch.tanh(self.again(torch.tanh(self.middle(self.embedding(tokens))))))


def tied_once(module, rank):
    tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(rank))
    F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()


def tied_job(rank):
    net = Tied().double()
    model = wrap(copy.deepcopy(net))
    assert len(model.reducer.plan) and model.module.head.weight is model.module.embedding.weight
    tied_once(model, rank.index)
    require_gradients(model, mean_gradients(net, rank.size, tied_once))


def test_tied_parameters_are_reduced_once(ranks):
    ranks(tied_job)


class Sparse(torch.nn.Module):
    def __init__(self, bag):
        super().__init__()
        torch.manual_seed(3)
        self.table = (
            torch.nn.EmbeddingBag(9, 4, mode="sum", sparse=True)
            if bag
            else torch.nn.Embedding(9, 4, sparse=True)
        )
        self.head = torch.nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def sparse_once(module, rank):
    tokens = torch.tensor([[0, 1, 1], [3 + rank, 1, 8]])  # one that repeats, some of one rank only
    module(tokens).square().sum().backward()


def sparse_job(rank, bag):
    net = Sparse(bag).double()
    model = wrap(copy.deepcopy(net))
    theirs = DistributedDataParallel(copy.deepcopy(net))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    for step in range(2):
        sparse_once(model, rank.index)
        sparse_once(theirs, rank.index)
        assert model.module.table.weight.grad.is_sparse
        if step == 0:
            require_gradients(model, mean_gradients(net, rank.size, sparse_once))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours, other, rtol=1e-12)


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_are_those_of_torchs_class(ranks, bag):
    ranks(sparse_job, bag)


class Branches(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        torch.manual_seed(5)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(count))
        self.used = range(count)

    def forward(self, x):
        return sum(self.branches[i](x) for i in self.used)


def branch_once(used_by):
    def train(module, rank):
        getattr(module, "module", module).used = used_by[rank]
        module(noise(rank, 3, 4)).square().sum().backward()

    return train


USED = [
    [[0, 1, 2], [0, 1, 2]],
    [[0], [1]],  # different ones; 2 by nobody
    [[2, 0], [0]],
    [[1], [1]],
    [[0, 1, 2], [2]],
]


def unused_job(rank):
    net = Branches(3).double()
    model = wrap(copy.deepcopy(net))
    for used_by in USED:
        train = branch_once(used_by)
        train(model, rank.index)
        expected = mean_gradients(net, rank.size, train)
        require_gradients(model, expected)
        nobody = {f"branches.{i}.weight" for i in range(3)} - {
            f"branches.{i}.weight" for used in used_by for i in used
        }
        assert nobody == {n for n, g in expected.items() if g is None and n.endswith("weight")}
        model.zero_grad()


def test_unused_parameters_need_no_flag_and_stay_none_where_nobody_used_them(ranks):
    ranks(unused_job)


def kept_when_unused_job(rank):
    """Without zero_grad between: what nobody used in this backward keeps what it had, as under torch's class."""
    net = Branches(3).double()
    models = (
        wrap(copy.deepcopy(net)),
        DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=True),
    )
    for used_by in ([[0, 1], [0, 1]], [[0], [0]], [[0, 2], [0]]):
        for model in models:
            branch_once(used_by)(model, rank.index)
        require_gradients(models[0], gradients_of(models[1]))


def test_gradients_of_an_earlier_backward_stay_where_nobody_used_the_parameter(ranks):
    ranks(kept_when_unused_job)


def frozen_later_job(rank):
    net = small_net()
    model = wrap(copy.deepcopy(net))
    train_once(model, rank.index)
    model.zero_grad()
    for part in (net, model.module):
        part[0].requires_grad_(False)
    train_once(model, rank.index)
    require_gradients(model, mean_gradients(net, rank.size, train_once))
    assert model.module[0].weight.grad is None
    model.zero_grad()
    for part in (net, model.module):
        part[0].requires_grad_(True)
    train_once(model, rank.index)
    require_gradients(model, mean_gradients(net, rank.size, train_once))


def test_parameters_may_be_frozen_and_thawed_later(ranks):
    ranks(frozen_later_job)


class Checkpointed(torch.nn.Module):
    def __init__(self, reentrant, times, unused):
        super().__init__()
        torch.manual_seed(6)
        self.below = torch.nn.Linear(6, 6)
        self.layer = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())
        self.above = torch.nn.Linear(6, 3)
        self.unused = torch.nn.Linear(2, 2) if unused else None
        self.how = reentrant, times

    def forward(self, x):
        reentrant, times = self.how
        x = self.below(x)
        for _ in range(times):
            x = checkpoint(self.layer, x, use_reentrant=reentrant)
        return self.above(x)


def checkpoint_job(rank, reentrant, times, unused, cap):
    net = Checkpointed(reentrant, times, unused).double()
    model = wrap(copy.deepcopy(net), bucket_cap_mb=cap)
    expected = mean_gradients(net, rank.size, train_once)
    for _ in range(3):
        train_once(model, rank.index)
        require_gradients(model, expected)
        require_same_everywhere(
            rank, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        )
        model.zero_grad()


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize(
    ("reentrant", "times", "cap"),
    [
        (False, 1, 0.0001),
        (False, 2, 0.0001),
        (True, 1, 0.0001),
        (True, 2, 25),  # in small buckets: test_late_gradients.py
    ],
)
def test_checkpointed_layers_get_the_same_gradients(ranks, reentrant, times, unused, cap):
    ranks(checkpoint_job, reentrant, times, unused, cap)
