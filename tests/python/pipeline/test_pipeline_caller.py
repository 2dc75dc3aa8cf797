"""What stages see of their caller, and a batch in which nothing counts: as in a sizer, or a model that is not cut."""

import contextvars

import pytest
import torch
from torch import nn

import brimful

ROWS, WIDTH = 8, 16


def mean_square(output, target):
    return (output - target).square().mean()


def pipeline_of(stages, loss_fn, **options):
    return brimful.Pipeline(
        stages, devices=["cpu"] * len(stages), microbatches=4, loss_fn=loss_fn, **options
    )


mode = contextvars.ContextVar("mode", default="unset")


class Reading(nn.Linear):
    """Notes what a context variable is in forward, in backward, and when a recomputed forward runs again."""

    def __init__(self, log):
        super().__init__(WIDTH, WIDTH)
        self.log = log

    def forward(self, x):
        self.log.append(mode.get())
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda _: self.log.append(mode.get()))
        mode.set("changed in a stage")
        return output


@pytest.mark.parametrize("recompute", [(), "all"])
def test_stages_see_the_callers_context_variables_as_of_the_step(recompute):
    log = []

    def loss(output, target):
        log.append(mode.get())
        return mean_square(output, target)

    pipe = pipeline_of([Reading(log), Reading(log)], loss, recompute=recompute)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def step(value, call):
        log.clear()
        mode.set(value)
        call()
        assert mode.get() == value, "a stage's change stays the stage's"
        return set(log)

    context = contextvars.copy_context()
    assert context.run(step, "one", lambda: pipe.step(x, y)) == {"one", "changed in a stage"}
    assert context.run(step, "two", lambda: pipe.step(x, y)) == {"two", "changed in a stage"}
    assert context.run(step, "three", lambda: pipe.forward(x)) == {"three", "changed in a stage"}
    log.clear()
    pipe.step(x, y)
    assert set(log) == {"unset", "changed in a stage"}


def no_tokens(output, target):
    counted = int((target != -100).sum())
    return nn.functional.cross_entropy(output, target, ignore_index=-100), counted


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_batch_in_which_nothing_counts_raises_in_a_pipeline_as_in_a_sizer(microbatches):
    stages = [nn.Linear(4, 4), nn.Linear(4, 3)]
    pipe = brimful.Pipeline(
        stages, devices=["cpu", "cpu"], microbatches=microbatches, loss_fn=no_tokens
    )
    sizer = brimful.BatchSizer(nn.Sequential(*stages))
    x, none = torch.randn(ROWS, 4), torch.full((ROWS,), -100)

    def loss(model, piece):
        return no_tokens(model(piece[0]), piece[1])

    for call in (lambda target: pipe.step(x, target), lambda target: sizer.step((x, target), loss)):
        with pytest.raises(ValueError, match=r"sum to 0(.0)?, and a mean over nothing is no loss"):
            call(none)
        assert all(p.grad is None for stage in stages for p in stage.parameters())
        some = none.clone()
        some[0] = 1
        assert call(some).weight == 1
        for stage in stages:
            stage.zero_grad()
