"""The C++ GradScaler beside torch's own, call by call."""

import random

import pytest
import torch

from brimful import _C

FACTORS = [1.0, 1.0, 1.0, 0.3, float("inf"), float("-inf"), float("nan")]


class Job:
    """A dense and a sparse parameter, each with an optimizer of its own."""

    def __init__(self):
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
        self.optimizers = [torch.optim.SGD([p], lr=0.1) for p in self.parameters]

    def loss(self, factors, rows):
        dense, table = self.parameters
        found = torch.nn.functional.embedding(rows, table, sparse=True)
        return (dense.square() * factors[0]).sum() + (found.square() * factors[1]).sum()

    def values(self):
        return [p.detach().clone() for p in self.parameters]

    def gradients(self):
        return [p.grad.to_dense().clone() for p in self.parameters]


def same(left, right):
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_cpp_scaler_equals_torchs_step_by_step(seed):
    choice = random.Random(seed)
    options = {
        "init_scale": choice.choice([65536.0, 3.0, 1e30]),
        "growth_factor": choice.choice([2.0, 1.7]),
        "backoff_factor": choice.choice([0.5, 0.3]),
        "growth_interval": choice.choice([1, 2, 3]),
    }
    theirs, ours = torch.amp.GradScaler("cpu", **options), _C._GradScaler(**options)
    job, other = Job(), Job()
    skipped = grown = 0
    for step in range(60):
        factors = choice.choice(FACTORS), choice.choice(FACTORS[:4])
        rows = torch.tensor([choice.randrange(5) for _ in range(4)])
        for optimizer in (*job.optimizers, *other.optimizers):
            optimizer.zero_grad()
        theirs.scale(job.loss(factors, rows)).backward()
        ours.scale(other.loss(factors, rows)).backward()
        assert same(job.gradients(), other.gradients()), step
        keys = [id(optimizer) for optimizer in other.optimizers]
        if choice.random() < 0.5:  # to clip, say
            theirs.unscale_(job.optimizers[0])
            ours.unscale(keys[0], other.parameters[:1])
        for optimizer in job.optimizers:
            theirs.step(optimizer)
        for index, optimizer in enumerate(other.optimizers):
            skipped += not ours.step(keys[index], [other.parameters[index]], optimizer.step)
        assert same(job.gradients(), other.gradients()), step
        assert same(job.values(), other.values()), step
        before = theirs.get_scale()
        new_scale = choice.choice([8.0, None, None, None, None, None, None, None])
        theirs.update(new_scale)
        ours.update(new_scale)
        assert ours.state() == theirs.state_dict(), step
        grown += theirs.get_scale() > before
    assert skipped > 5
    assert grown > 5


def test_states_travel_between_the_two():
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=12.0), _C._GradScaler()
    theirs.load_state_dict({**theirs.state_dict(), "_growth_tracker": 7})
    ours.load_state(theirs.state_dict())
    assert ours.state() == theirs.state_dict()
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state())
    assert back.state_dict() == theirs.state_dict()


def test_a_disabled_scaler_has_no_state():
    assert (
        _C._GradScaler(enabled=False).state()
        == torch.amp.GradScaler("cpu", enabled=False).state_dict()
    )
