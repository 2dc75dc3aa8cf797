"""What a pipeline's user may do between, around and inside its steps."""

import os
import signal

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from test_pipeline import check, data, net, whole
from torch import nn

import brimful
from brimful import Pipeline, split_sequential
from brimful.pipeline import pop, stash

pytestmark = pytest.mark.usefixtures("no_limit")


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


def test_inference_that_fails_leaves_the_gradients_of_the_step_before_alone():
    class Failing(nn.Module):
        fails = False

        def forward(self, x):
            if self.fails:
                raise RuntimeError("no")
            return x

    model, failing = net(), Failing()
    x, y = data()
    pipe = Pipeline([model, failing], microbatches=2, loss_fn=F.mse_loss)
    pipe.step(x, y)
    before = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    failing.fails = True
    with pytest.raises(RuntimeError, match="no"):
        pipe.forward(x)
    assert all(
        torch.equal(gradient, before[name]) for name, gradient in gradients_of(model).items()
    )


def test_parameters_that_are_unfrozen_later_belong_to_the_step():
    def weighted(output, target):
        return F.mse_loss(output, target), 3.0 * len(target)

    model = net()
    model[0].weight.requires_grad_(False)
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=4, loss_fn=weighted)
    pipe.step(*data())
    model.zero_grad()
    model[0].weight.requires_grad_(True)
    _, gradients = whole(model, *data())
    pipe.step(*data())
    assert relative_difference(gradients_of(model), gradients) < 1e-12


def test_casts_are_not_kept_where_the_caller_keeps_none():
    model = net(dtype=torch.float32)
    x, y = data(dtype=torch.float32)
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=2, loss_fn=F.mse_loss)
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            losses.append(pipe.step(x, y).loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        torch.clear_autocast_cache()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(2)
        assert pipe.step(x, y).loss == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.l1_loss])
def test_nothing_of_a_microbatch_is_held_when_it_is_done(loss):
    in_use = []

    def loss_fn(output, target):
        in_use.append(brimful.memory.stats("cpu").used_bytes)
        return loss(output, target)

    x = torch.randn(64 * 128, 64)
    pipe = Pipeline([nn.Linear(64, 64), nn.Linear(64, 64)], microbatches=64, loss_fn=loss_fn)
    pipe.step(x, x)
    in_use.clear()
    pipe.step(x, x)
    microbatch = 128 * 64 * 4
    # What the threads' own actions take comes and goes; what every microbatch left behind would add up.
    assert min(in_use[-8:]) - min(in_use[8:16]) < 16 * microbatch


# fork() beside other threads is what this is about.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told_so_and_ends():
    model = net()
    pipe = check(model, split_sequential(model, [2, 2]), *data())
    child = os.fork()
    if child == 0:
        try:
            pipe.step(*data())
        except ValueError as error:
            code = 3 if "forked" in str(error) else 4
        else:
            code = 5
        try:
            del pipe
        finally:
            os._exit(code)
    signal.alarm(60)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        signal.alarm(0)
    assert os.waitstatus_to_exitcode(status) == 3
