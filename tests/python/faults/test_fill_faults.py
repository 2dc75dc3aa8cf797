"""An allocation is refused at every place of a step over mixed dtypes, sparse and large gradients."""

import pytest
import torch
import torch.distributed as dist
from models import gradients_of

import brimful
from brimful import _C

NEVER = 1 << 40


class Mixed(torch.nn.Module):
    """Gradients in float32, float64 and bfloat16, a sparse one, a strided one and one of 4 MiB."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(20, 8, sparse=True)
        self.wide = torch.nn.Linear(8, 131072 + 64, bias=False)
        self.exact = torch.nn.Linear(8, 4, dtype=torch.float64)
        self.coarse = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
        self.image = torch.nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, tokens):
        x = self.table(tokens)
        y = self.exact(x.double()).sum() + self.coarse(x.bfloat16()).sum().double()
        image = self.image(x.view(len(tokens), 1, 2, 4)).sum()
        return (y + image.double()) / len(tokens) + self.wide(x).square().mean()


def tokens_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 20, (4,), generator=generator)


def close(mine, expected, wire):
    for name, gradient in expected.items():
        a, b = (g.to_dense().double() for g in (mine[name], gradient))
        tolerance = 0.05 if torch.bfloat16 in (gradient.dtype, wire) else 1e-5
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name


def places_of(rank, failing, step, check):
    """Steps with the fault at the failing rank's allocation 0, 1, ... until none is left, each followed by a check."""
    for index in range(400):
        with _C._FaultAt(index if rank.index == failing else NEVER) as fault:
            step()
        check()
        hit = [fault.fired]
        dist.broadcast_object_list(hit, failing)
        if not hit[0]:
            return index
    raise AssertionError("the step has no end")


def sizer_job(rank, failing, wire):
    model = brimful.DistributedDataParallel(Mixed(), bucket_cap_mb=0.0001, wire_dtype=wire)
    tokens = tokens_of(rank.index)

    def loss_fn(model, piece):
        return model(piece)

    brimful.BatchSizer(model).step(tokens, loss_fn)
    expected = gradients_of(model)
    retries = [0]

    def step():
        retries[0] += brimful.BatchSizer(model).step(tokens, loss_fn).retries

    def check():
        close(gradients_of(model), expected, wire)
        model.zero_grad()

    model.zero_grad()
    return places_of(rank, failing, step, check), retries[0]


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["as it is", "bfloat16"])
@pytest.mark.parametrize("failing", [0, 1])
def test_every_place_of_a_sizers_step(ranks, failing, wire):
    for places, retries in ranks(sizer_job, failing, wire, watchdog_s=60):
        assert places > 30
        assert retries > 0


class Counted(torch.nn.Module):
    """Counts its rows in a buffer that it replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(20, 8)
        self.inner = torch.nn.Linear(8, 4)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, tokens):
        self.rows = self.rows + len(tokens)
        return self.inner(self.table(tokens)).square().mean()


def changing_job(rank, failing):
    """The batch is changed in place, which a sizer knows from the step before."""
    module = Counted()
    model = brimful.DistributedDataParallel(module, bucket_cap_mb=0.0001)
    before = tokens_of(rank.index)
    after = before.mul(3).add(1).remainder(20)
    retries = [0]

    def loss_fn(model, piece):
        return model(piece.mul_(3).add_(1).remainder_(20))

    brimful.BatchSizer(model).step(before.clone(), loss_fn)
    expected = gradients_of(model)

    def step():
        retries[0] += sizer.step(tokens, loss_fn).retries

    def prepare():
        nonlocal sizer, tokens
        tokens = before.clone()
        sizer = brimful.BatchSizer(model)
        model.zero_grad()
        sizer.step(before.clone(), loss_fn)
        model.zero_grad()
        module.rows = torch.zeros(())

    def check():
        close(gradients_of(model), expected, None)
        assert module.rows == len(before)
        assert torch.equal(tokens, after)
        prepare()

    sizer = tokens = None
    prepare()
    return places_of(rank, failing, step, check), retries[0]


def test_every_place_of_a_step_that_changes_what_it_is_given(ranks):
    for places, retries in ranks(changing_job, 1, watchdog_s=60):
        assert places > 20
        assert retries > 0


def plain_job(rank, failing, wire):
    """Both ranks raise or neither does, and the step after it is right."""
    model = brimful.DistributedDataParallel(Mixed(), bucket_cap_mb=0.0001, wire_dtype=wire)
    tokens = tokens_of(rank.index)
    model(tokens).backward()
    expected = gradients_of(model)
    model.zero_grad()
    raised = [0]

    def step():
        error = None
        try:
            with model.step():
                model(tokens).backward()
        except (torch.OutOfMemoryError, brimful.RankOutOfMemory) as e:
            error = e
        raised[0] += error is not None
        assert error is None or isinstance(error, brimful.RankOutOfMemory) == (
            rank.index != failing
        )

    places = places_of(rank, failing, step, model.zero_grad)
    model(tokens).backward()
    close(gradients_of(model), expected, wire)
    return places, raised[0]


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["as it is", "bfloat16"])
@pytest.mark.parametrize("failing", [0, 1])
def test_every_place_of_a_plain_step(ranks, failing, wire):
    first, second = ranks(plain_job, failing, wire, watchdog_s=60)
    assert first == second
    assert first[0] > 30 and first[1] > 30
