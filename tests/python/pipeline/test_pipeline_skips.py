"""Skips and changes in place across a cut: under checkpoints, outside a pipeline, and what is refused."""

import functools

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from test_pipeline import data, net, whole
from torch import nn
from torch.utils.checkpoint import checkpoint

from brimful import Pipeline, split_sequential
from brimful.pipeline import pop, stash

pytestmark = pytest.mark.usefixtures("no_limit")

SCHEDULES = ["gpipe", "1f1b", "zb_h1"]


class Layer(nn.Module):
    """A layer that may stash, or pop, within a checkpoint."""

    def __init__(self, does=None, reentrant=None):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.does, self.reentrant = does, reentrant

    def work(self, x):
        h = torch.tanh(self.linear(x))
        if self.does == "stash":
            stash("side", h * 2)  # beside the path to the output
            stash("h", h)  # on it
            stash("nothing", None)
            stash("mask", h.detach() > 0)
        if self.does == "pop":
            assert pop("nothing") is None
            return torch.sin(h * pop("h")) + pop("side") * pop("mask")
        return h.sin()

    def forward(self, x):
        if self.reentrant is None:
            return self.work(x)
        return checkpoint(self.work, x, use_reentrant=self.reentrant)


def skipping(stashing=None, popping=None):
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer("stash", stashing), Layer(), Layer("pop", popping))


def by_hand(model, x):
    h = torch.tanh(model[1].linear(model[0](x)))
    end = torch.tanh(model[3].linear(model[2](h.sin())))
    return torch.sin(end * h) + h * 2 * (h.detach() > 0)


def reference(x, y):
    model = skipping()
    loss = F.mse_loss(by_hand(model, x), y)
    loss.backward()
    return loss.item(), gradients_of(model)


COMBINATIONS = [
    (stashing, popping)
    for stashing in (None, False, True)
    for popping in (None, False, True)
    if (stashing, popping) != (None, None)
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stashing, popping", COMBINATIONS)
def test_a_checkpoint_may_be_around_stash_and_pop(schedule, stashing, popping):
    x, y = data()
    loss, gradients = reference(x, y)
    model = skipping(stashing, popping)
    pipe = Pipeline(list(model), schedule=schedule, microbatches=4, loss_fn=F.mse_loss)
    for _ in range(2):
        assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
        assert relative_difference(gradients_of(model), gradients) < 1e-12
        model.zero_grad()
    torch.testing.assert_close(pipe.forward(x), by_hand(model, x).detach())


@pytest.mark.parametrize("stashing", [None, False])
@pytest.mark.parametrize("popping", [None, False])
def test_stash_and_pop_may_be_in_one_stage_under_checkpoints(stashing, popping):
    x, y = data()
    loss, gradients = reference(x, y)
    model = skipping(stashing, popping)
    pipe = Pipeline([model[:1], model[1:]], microbatches=4, loss_fn=F.mse_loss)
    assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
    assert relative_difference(gradients_of(model), gradients) < 1e-12


@pytest.mark.parametrize("popping", [None, True])
def test_a_reentrant_checkpoint_may_stash_for_its_own_stage(popping):
    x, y = data()
    loss, gradients = reference(x, y)
    model = skipping(True, popping)
    pipe = Pipeline([model[:1], model[1:]], microbatches=4, loss_fn=F.mse_loss)
    assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
    assert relative_difference(gradients_of(model), gradients) < 1e-12


@pytest.mark.parametrize("stashing", [None, False])
@pytest.mark.parametrize("popping", [None, False])
def test_the_model_that_is_not_cut_runs_as_it_is(stashing, popping):
    x, y = data()
    loss, gradients = reference(x, y)
    model = skipping(stashing, popping)
    for _ in range(2):
        found = F.mse_loss(model(x), y)
        found.backward()
        assert found.item() == pytest.approx(loss, rel=1e-12)
        assert relative_difference(gradients_of(model), gradients) < 1e-12
        model.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(x), by_hand(model, x))


@pytest.mark.parametrize("stashing, popping", [(True, None), (None, True)])
def test_a_reentrant_checkpoint_outside_a_pipeline_is_distinguished(stashing, popping):
    x, y = data()
    model = skipping(stashing, popping)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        F.mse_loss(model(x), y).backward()


def test_what_nobody_pops_fails_the_step_before_any_backward():
    model = net()
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(seen.append)

    def first(x, keep=True):
        x = model[0](x)
        if keep:
            stash("left", x)
        return x

    x, y = data()
    stages = [first, model[1:]]
    pipe = Pipeline(stages, microbatches=4, loss_fn=F.mse_loss, schedule="gpipe")
    for call in (lambda: pipe.step(x, y), lambda: pipe.forward(x)):
        with pytest.raises(ValueError, match=r"no stage has popped \(name: left\)") as error:
            call()
        assert "microbatch 0 in stage 1" in str(error.value)
    assert not seen and all(p.grad is None for p in model.parameters())
    assert pipe.step(x, y, keep=False).loss > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_layer_of_a_stage_may_work_in_place(schedule):
    def made(inplace):
        torch.manual_seed(0)
        linear = functools.partial(nn.Linear, 6, 6, dtype=torch.float64)
        act = functools.partial(nn.ReLU, inplace=inplace)
        return nn.Sequential(linear(), act(), linear(), nn.LeakyReLU(0.1, inplace), linear())

    x, y = data()
    before = x.clone()
    loss, gradients = whole(made(False), x, y)
    model = made(True)
    stages = split_sequential(model, [1, 2, 2])
    pipe = Pipeline(stages, schedule=schedule, microbatches=4, loss_fn=F.mse_loss)
    for _ in range(2):
        assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
        assert relative_difference(gradients_of(model), gradients) < 1e-12
        model.zero_grad()
    torch.testing.assert_close(pipe.forward(x), made(False)(x).detach())
    assert torch.equal(x, before)


def test_what_the_stage_before_needs_may_not_be_changed():
    """As in the model that is not cut: tanh has saved its result."""
    model = nn.Sequential(*net(1), nn.ReLU(inplace=True))
    x, y = data()
    pipe = Pipeline(split_sequential(model, [2, 1]), microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pipe.step(x, y)


def test_a_skip_that_a_later_stage_has_changed_is_refused():
    model = net(2)

    def first(x):
        h = model[0](x)
        stash("h", h)
        return h

    x, y = data()

    def tail(x):
        return model[2](x) + pop("h")

    pipe = Pipeline([first, lambda x: x.relu_(), tail], microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match=r"changed a tensor in place that was stashed \(name: h\)"):
        pipe.step(x, y)

    # What is popped may be.
    h = model[0](x)
    loss = F.mse_loss(model[2](h.relu()) + h.tanh(), y)
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    stages = [first, lambda x: model[2](x.relu()) + pop("h").tanh_(), lambda x: x]
    pipe = Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    assert pipe.step(x, y).loss == pytest.approx(loss.item(), rel=1e-12)
    assert relative_difference(gradients_of(model), gradients) < 1e-12


def test_a_tensor_that_the_same_stage_takes_back_keeps_its_gradient():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.in_a_stage = net(stages=1), False

        def forward(self, x):
            before = self.model[0](x)
            if self.in_a_stage:
                stash("h", before)
            after = self.model[1](before)
            return after + (pop("h") if self.in_a_stage else before)

    reference, model = Skipping(), Skipping()
    model.in_a_stage = True
    _, gradients = whole(reference, *data())
    pipe = Pipeline([model, nn.Identity()], microbatches=4, loss_fn=F.mse_loss)
    pipe.step(*data())
    assert relative_difference(gradients_of(model), gradients) < 1e-12
