"""What an optimizer will take is in use before sizes are chosen, and nothing of it is seen in its steps."""

import logging

import pytest
import torch
from models import classes, cross_entropy, seed, used
from rank_processes import raised
from test_prediction import limit
from torch.optim.optimizer import register_optimizer_step_pre_hook

import brimful
from brimful import _C

KINDS = {
    "Adam": {"lr": 0.01},
    "Adam, foreach": {"lr": 0.01, "foreach": True, "weight_decay": 0.1, "amsgrad": True},
    "Adam, fused": {"lr": 0.01, "fused": True},
    "AdamW": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam, foreach": {"lr": 0.01, "foreach": True},
    "Adamax": {"lr": 0.01},
    "Adadelta": {"lr": 0.1},
    "Adagrad, foreach": {"lr": 0.1, "foreach": True},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
    "Adafactor, foreach": {"lr": 0.01, "foreach": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "SGD, fused": {"lr": 0.1, "momentum": 0.9, "fused": True},
    "SGD, plain": {"lr": 0.1},
}


def perceptron(width=300):
    seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    )


def make(name, model):
    return getattr(torch.optim, name.split(",")[0])(model.parameters(), **KINDS[name])


def state_of(optimizer):
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in s.items()
        }
        for s in optimizer.state.values()
    ]


def train(name, told):
    """Parameters, states after every step, and the bytes in use around the first one."""
    model = perceptron()
    optimizer = make(name, model)
    sizer = brimful.BatchSizer(model, optimizer if told else None)
    states, bytes = [], []
    for step in range(3):
        sizer.step(classes(20, seed=step), cross_entropy)
        states.append(state_of(optimizer))
        if step == 0:
            bytes.append(used())
        optimizer.step()
        if step == 0:
            bytes.append(used())
        optimizer.zero_grad()
    states.append(state_of(optimizer))
    return [p.detach().clone() for p in model.parameters()], states, bytes


def same(a, b):
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("name", KINDS)
def test_training_is_the_same_to_the_bit_and_the_state_has_its_room_before(name):
    parameters, states, (before, after) = train(name, told=False)
    ours, our_states, (our_before, our_after) = train(name, told=True)
    assert same(ours, parameters)
    assert same(our_states, states)  # before the first step too: nothing is made
    assert our_before == our_after
    if name in ("SGD, plain", "Adagrad, foreach"):
        assert after == before
    else:  # Adafactor keeps a row and a column of each matrix
        assert after - before >= (2 * 300 if "Adafactor" in name else 9 * 300) * 4


@pytest.mark.parametrize("name", ["Adam", "Adam, foreach", "Adam, fused", "SGD"])
def test_no_later_step_has_less_room_than_the_first(name):
    model = perceptron(20_000)
    optimizer = make(name, model)
    sizer = brimful.BatchSizer(model, optimizer, predict=True)
    batch = classes(100)
    refused = brimful.memory.stats("cpu").ooms
    pieces = []
    with limit(used() + 14_000_000):
        for _ in range(4):
            pieces.append(sizer.step(batch, cross_entropy).pieces)
            optimizer.step()
            optimizer.zero_grad()
    assert brimful.memory.stats("cpu").ooms == refused
    assert len(set(pieces)) == 1 and pieces[0] > 1


@pytest.mark.parametrize("name", ["Adam", "Adam, foreach", "Adam, fused", "Rprop"])
def test_a_plan_knows_the_optimizers_step_before_and_after_it_was_seen(name):
    model = perceptron(50_000)
    optimizer = make(name, model)
    sizer = brimful.BatchSizer(model, optimizer)
    batch = classes(4)
    sizer.plan(batch, cross_entropy)  # what is made once
    plans, peaks = [], []
    for _ in range(3):
        plans.append(sizer.plan(batch, cross_entropy))
        with _C._PeakScope("cpu") as step:
            sizer.step(batch, cross_entropy)
            optimizer.step()
        peaks.append(step.peak_bytes)
        optimizer.zero_grad()
    for plan, peak in zip(plans, peaks, strict=True):
        # kernels wrap numbers in tensors
        assert -64 <= plan.peak_bytes - peak <= 0.005 * peak + 40_000


def test_a_plan_is_divided_into_what_it_consists_of():
    model = torch.nn.Sequential(torch.nn.Linear(6, 100), torch.nn.BatchNorm1d(100))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    sizer = brimful.BatchSizer(model, optimizer)

    def loss(model, piece):
        return model(piece).square().mean()

    batch = torch.randn(500, 6)
    for _ in range(2):
        plan = sizer.plan(batch, loss)
        assert plan.parameter_bytes == 4 * (600 + 100 + 100 + 100)
        assert plan.gradient_bytes == 4 * (600 + 100 + 100)
        assert plan.optimizer_bytes == 2 * plan.gradient_bytes + 3 * 4  # and its counters
        assert plan.buffer_bytes == 4 * (100 + 100) + 8
        parts = (
            plan.parameter_bytes,
            plan.gradient_bytes,
            plan.optimizer_bytes,
            plan.buffer_bytes,
            plan.activation_bytes,
        )
        assert sum(parts) == plan.peak_bytes
        assert plan.activation_bytes > 500 * 100 * 4
        assert all(f"{name}=" in repr(plan) for name in ("gradients", "activations"))
        sizer.step(batch, loss)
        optimizer.step()
        optimizer.zero_grad()


def test_a_limit_without_room_for_the_state_is_refused_before_anything_runs():
    model = perceptron(100_000)
    optimizer = torch.optim.Adam(model.parameters())
    bytes = sum(4 * p.numel() for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    sizer = brimful.BatchSizer(model, optimizer)
    batch = classes(2)
    with limit(3 * bytes):
        error = raised(sizer.step, batch, cross_entropy)
    assert type(error) is ValueError and "optimizer state" in str(error)
    assert not optimizer.state and same([p.detach() for p in model.parameters()], before)


def test_state_that_is_there_is_not_counted_twice():
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer)
    sizer.step(classes(20), cross_entropy)
    optimizer.zero_grad()
    kept = used()
    other = torch.optim.Adam(model.parameters())
    cross_entropy(model, classes(20)).backward()
    other.step()
    optimizer.load_state_dict(other.state_dict())
    del other
    optimizer.zero_grad()
    sizer.step(classes(20), cross_entropy)
    optimizer.zero_grad()
    assert abs(used() - kept) < 1000


class Home(torch.optim.Adam):
    """An optimizer of the program's own."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """One that steps an optimizer within it."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.inner = torch.optim.Adam(parameters)

    def step(self, closure=None):
        return self.inner.step(closure)


def test_room_is_kept_for_the_state_of_an_optimizer_that_is_not_torchs():
    model = perceptron()
    optimizer = Home(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer)
    before = used()
    sizer.step(classes(20), cross_entropy)
    optimizer.zero_grad()
    kept = used() - before
    assert kept >= 2 * sum(p.nbytes for p in model.parameters())  # moments
    assert optimizer.steps == 0 and not optimizer.state


def test_an_optimizer_whose_step_is_not_known_is_left_alone(caplog):
    model = perceptron()
    optimizer = Around(model.parameters())
    with caplog.at_level(logging.INFO, logger="brimful"):
        sizer = brimful.BatchSizer(model, optimizer)
        before = used()
        sizer.step(classes(20), cross_entropy)
        optimizer.zero_grad()
    assert used() - before < 9 * 300 * 4  # of a moment
    assert not optimizer.inner.state
    assert "the state of Around" in caplog.text


def test_hooks_and_subclasses_that_only_add_to_torchs_are_not_called():
    class Named(torch.optim.AdamW):
        def __init__(self, parameters, name):
            super().__init__(parameters, lr=0.1)
            self.name = name

    calls = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        model = perceptron()
        optimizer = Named(model.parameters(), "mine")
        optimizer.register_step_pre_hook(lambda *_: calls.append(2))
        sizer = brimful.BatchSizer(model, optimizer)
        before = used()
        sizer.step(classes(20), cross_entropy)
        optimizer.zero_grad()
        assert used() - before >= 2 * 4 * 9 * 300
        assert calls == []
    finally:
        handle.remove()
