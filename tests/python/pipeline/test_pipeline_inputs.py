"""The caller's batch: the gradient that it gets from a step, and that a repeated step finds it as it was."""

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from test_pipeline import data, net
from torch import nn

import brimful
from brimful import Pipeline, split_sequential

pytestmark = pytest.mark.usefixtures("no_limit")


class Short:
    """A loss for which memory runs out a number of times."""

    def __init__(self, times=1, change=None):
        self.left, self.change = times, change

    def __call__(self, output, target):
        if self.change is not None:
            self.change(target)
        loss = F.mse_loss(output, target.clone())
        if self.left > 0:
            self.left -= 1
            raise torch.OutOfMemoryError("planted")
        return loss


def any_gradient(model):
    return any(parameter.grad is not None for parameter in model.parameters())


class Shifted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, shift, table):
        return self.inner(x) * shift + table


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_an_input_and_keywords_get_their_gradients(schedule):
    model = net(4)
    stages = [Shifted(stage) for stage in split_sequential(model, [2, 2, 2, 2])]
    generator = torch.Generator().manual_seed(2)
    x, y = data()
    ids = torch.randint(0, 5, (11,), generator=generator)

    def fresh(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    table, shift, front = fresh(6), fresh(11, 1), fresh(5, 6)
    leaves = {"x": x.requires_grad_(), "shift": shift, "table": table, "front": front}

    def taken():
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        for leaf in leaves.values():
            leaf.grad = None
        model.zero_grad()
        return gradients

    h = x + front[ids]
    for stage in stages:
        h = stage(h, shift=shift, table=table)
    F.mse_loss(h, y).backward()
    gradients, expected = gradients_of(model), taken()
    devices = ["cpu"] * (2 if schedule == "interleaved_1f1b" else 4)
    for left in (0, 1, 2):  # repeated with more microbatches, or not
        pipe = Pipeline(
            stages,
            devices=devices,
            schedule=schedule,
            microbatches=4 if left < 2 else 2,
            loss_fn=Short(left),
            kwargs_dim={"table": None},
        )
        outcome = pipe.step(x + front[ids], y, shift=shift, table=table)
        assert outcome.retries == left
        assert relative_difference(gradients_of(model), gradients) < 1e-12
        assert relative_difference(taken(), expected) < 1e-12
    pipe.step(x, y, shift=shift, table=table)
    once = taken()
    for _ in range(2):  # added to what there is
        pipe.step(x, y, shift=shift, table=table)
    twice = taken()
    assert set(once) == set(twice) == {"x", "shift", "table"}
    for name in ("x", "shift", "table"):
        torch.testing.assert_close(twice[name], 2 * once[name], rtol=1e-12, atol=0)


def test_a_step_that_fails_gives_the_batch_no_gradient():
    model, (x, y) = net(), data()
    x.requires_grad_()
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=3, loss_fn=Short(100))
    with pytest.raises(brimful.BatchTooLarge):
        pipe.step(x, y)
    assert x.grad is None

    front = torch.randn(6, dtype=torch.float64, requires_grad=True)
    front.grad = torch.ones_like(front)

    def refuse(gradient):
        raise KeyError("in front")

    h = x + front
    h.register_hook(refuse)
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=3, loss_fn=F.mse_loss)
    with pytest.raises(KeyError, match="in front"):
        pipe.step(h, y)
    assert x.grad is None and torch.equal(front.grad, torch.ones_like(front))
    assert not any_gradient(model)


def test_forward_gives_no_gradient_and_takes_what_needs_one():
    model, (x, _) = net(), data()
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=3)
    assert not pipe.forward(x.requires_grad_()).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(pipe.forward(x), model(x))


def scaled_in_place(x):
    return x.mul_(
        2
    ).clone()  # what is saved for a backward may not be changed by another microbatch


class MaskedInPlace(nn.Module):
    def forward(self, x, mask):
        return x * mask.mul_(2)


PLACES = ["batch", "keyword", "target"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("failing", [False, True])
def test_a_batch_that_is_changed_in_place_is_as_it_was_in_a_repeated_step(place, failing):
    model = net(1)
    stages = [
        scaled_in_place if place == "batch" else torch.nn.Identity(),
        MaskedInPlace() if place == "keyword" else torch.nn.Identity(),
        model,
    ]
    keywords = {"mask": torch.ones(11, 1, dtype=torch.float64)} if place == "keyword" else {}

    def change(target):
        if place == "target":
            target.mul_(3)

    def step(pipe):
        x, y = data()
        given = [x, y, *(mask.clone() for mask in keywords.values())]
        before = [tensor.clone() for tensor in given]
        named = {"mask": given[2]} if keywords else {}
        try:
            outcome = pipe.step(x, y, **named)
        finally:
            gradients = gradients_of(model)
            model.zero_grad()
            step.kept = all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
        return outcome, gradients

    plain = Pipeline(stages, microbatches=3, loss_fn=Short(0, change))
    _, expected = step(plain)
    for steps_before in (0, 1, 2):
        loss_fn = Short(0, change)
        pipe = Pipeline(stages, microbatches=3, loss_fn=loss_fn)
        for _ in range(steps_before):
            step(pipe)
        loss_fn.left = 100 if failing else 2
        if failing:
            with pytest.raises(brimful.BatchTooLarge):
                step(pipe)
            assert step.kept
            continue
        outcome, gradients = step(pipe)
        assert outcome.retries == 2
        assert relative_difference(gradients, expected) < 1e-12


def test_a_batch_that_is_changed_in_place_for_the_first_time_in_a_later_step():
    model, (x, y) = net(1), data()
    changes = []

    def first(h):
        return h.mul_(2).clone() if changes else h * 2

    loss_fn = Short(0)
    pipe = Pipeline([first, model], microbatches=3, loss_fn=loss_fn)
    pipe.step(x, y)
    expected = gradients_of(model)
    model.zero_grad()
    changes.append(True)
    loss_fn.left = 1
    with pytest.raises(
        ValueError, match=r"a tensor of the batch was changed in place.*tensor: batch"
    ):
        pipe.step(x.clone(), y)
    assert not any_gradient(model)
    loss_fn.left = 1  # from then on there is a copy
    pipe.step(x, y)
    assert relative_difference(gradients_of(model), expected) < 1e-12
