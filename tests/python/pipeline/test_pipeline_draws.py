"""Stages of one process that draw random numbers: which draw is found out, and those take turns with the generator."""

import time

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference, seed
from torch import nn
from torch.utils.checkpoint import checkpoint

from brimful import Pipeline

pytestmark = pytest.mark.usefixtures("no_limit")


class Dropped(nn.Module):
    """Layers with dropout, which keep the masks that they draw, each with the number of forwards so far."""

    def __init__(self, checkpointed=False, p=0.5, width=16, layers=1):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, dtype=torch.float64) for _ in range(layers)
        )
        self.checkpointed, self.p, self.calls, self.masks = checkpointed, p, 0, []

    def inner(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.p > 0:
                mask = F.dropout(torch.ones_like(x), self.p)
                self.masks.append((self.calls, mask))
                x = x * mask
        return x

    def forward(self, x):
        self.calls += 1
        return (
            checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        )


def data(rows=12, width=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, width, generator=generator, dtype=torch.float64)


def made(count=3, **options):
    torch.manual_seed(0)
    return nn.ModuleList(Dropped(**options) for _ in range(count))


def pipe_of(stages, microbatches=4, **options):
    return Pipeline(list(stages), microbatches=microbatches, loss_fn=F.mse_loss, **options)


def from_masks(stages, microbatches, x, y):
    """Gradients of the same microbatches, computed with the masks that the forwards have drawn."""
    masks = [list(stage.masks) for stage in stages]
    for piece, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        h = piece
        for stage, drawn in zip(stages, masks, strict=True):
            for layer in stage.layers:
                h = torch.tanh(layer(h)) * drawn.pop(0)
        (F.mse_loss(h, target) * len(piece) / len(x)).backward()
    gradients = gradients_of(stages)
    stages.zero_grad()
    return gradients


def one_step(stages, pipe, x, y):
    """The step's gradients, and those that the masks of its forwards give."""
    for stage in stages:
        stage.masks.clear()
        stage.calls = 0
    outcome = pipe.step(x, y)
    gradients = gradients_of(stages)
    stages.zero_grad()
    count, tries = outcome.pieces, outcome.retries + 1
    layers = len(stages[0].layers)
    for stage in stages:  # of the attempt that stands
        assert stage.calls == count * tries
        unique = []
        for calls, mask in stage.masks:
            if calls > count * (tries - 1) and not any(torch.equal(mask, one) for one in unique):
                unique.append(mask)
        assert len(unique) == count * layers, "a recomputation has drawn other numbers"
        stage.masks[:] = unique
    return gradients, from_masks(stages, count, x, y)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_backward_has_the_numbers_of_its_forward(checkpointed, schedule):
    stages = made(checkpointed=checkpointed, layers=3)
    pipe = pipe_of(stages, schedule=schedule)
    x, y = data()
    for _ in range(20):
        gradients, expected = one_step(stages, pipe, x, y)
        assert relative_difference(gradients, expected) < 1e-12


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_seed_gives_the_same_step_whatever_the_threads_do(checkpointed):
    x, y = data()
    found = []
    for run in range(4):
        stages = made(checkpointed=checkpointed)
        pipe = pipe_of(stages)
        steps = []
        for step in range(3):
            if run == 3 and step == 0:  # what was found out before makes no difference
                seed(3)
                pipe.step(x, y)
                stages.zero_grad()
            if step == 0:
                seed(7)
            hooks = [
                stage.register_forward_pre_hook(
                    lambda *_, nap=(k * 7 % 3) * run / 2000: time.sleep(nap)
                )
                for k, stage in enumerate(stages)
            ]
            pipe.step(x, y)
            for hook in hooks:
                hook.remove()
            steps.append(gradients_of(stages))
            stages.zero_grad()
        assert relative_difference(steps[0], steps[1]) > 0.01, "the next step draws other numbers"
        found.append((steps, torch.rand(1)))
    for steps, after in found[1:]:
        for one, other in zip(steps, found[0][0], strict=True):
            assert relative_difference(one, other) == 0
        assert torch.equal(after, found[0][1])


def test_stages_draw_differently_from_each_other_and_in_each_microbatch():
    stages = made()
    pipe = pipe_of(stages)
    one_step(stages, pipe, *data())
    masks = [mask for stage in stages for mask in stage.masks]
    assert len(masks) == 12
    for i, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:i])


def test_a_stage_that_draws_nothing_leaves_the_generator_and_runs_beside_those_that_do():
    stages = made(p=0)
    pipe = pipe_of(stages)
    before = torch.get_rng_state()
    assert pipe.step(*data()).retries == 0
    assert torch.equal(torch.get_rng_state(), before)

    class Slow(nn.Module):
        def forward(self, x):
            began = time.perf_counter()
            time.sleep(0.03)
            spans.append((began, time.perf_counter()))
            return x

    drawing, spans = Dropped(), []

    def slow_and_drawing(x):
        began = time.perf_counter()
        time.sleep(0.03)
        drawn.append((began, time.perf_counter()))
        return drawing(x)

    for other, overlaps in ((Slow(), True), (slow_and_drawing, False)):
        drawn = []
        pipe = pipe_of([slow_and_drawing, other], microbatches=6, schedule="gpipe")
        pipe.step(*data())
        spans.clear(), drawn.clear()
        assert pipe.step(*data()).retries == 0
        pairs = (
            [(a, b) for a in drawn for b in spans]
            if overlaps
            else [(a, b) for i, a in enumerate(drawn) for b in drawn[:i]]
        )
        assert any(a[0] < b[1] and b[0] < a[1] for a, b in pairs) == overlaps


class PutsBack(torch.autograd.Function):
    """As a checkpoint that another thread interrupts: its backward leaves the generator where a forward found it."""

    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.set_rng_state(ctx.state)
        return gradient, None


def test_a_stage_that_draws_is_found_though_the_generator_is_put_back():
    class First(nn.Module):
        def forward(self, x):
            return PutsBack.apply(x, state)

    x, y = data()
    pipe = pipe_of([nn.Sequential(First(), nn.Linear(16, 16).double()), *made(count=1)])
    state = torch.get_rng_state()
    assert pipe.step(x.requires_grad_(), y).retries == 1
    torch.set_rng_state(state)
    assert pipe.step(x, y).retries == 0


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("begins", [0, 1, 2])
def test_a_stage_that_begins_to_draw_later_is_found(begins, checkpointed):
    stages = made(checkpointed=checkpointed)
    stages[begins].p = 0
    stages[begins].checkpointed = False
    pipe = pipe_of(stages)
    x, y = data()
    for _ in range(3):
        pipe.step(x, y)
        stages.zero_grad()
    stages[begins].p = 0.5
    stages[begins].checkpointed = checkpointed
    seed(5)
    late, expected = one_step(stages, pipe, x, y)
    assert relative_difference(late, expected) < 1e-12
    fresh = made(checkpointed=checkpointed)
    seed(5)
    early, _ = one_step(fresh, pipe_of(fresh), x, y)
    assert relative_difference(late, early) == 0


def test_a_repeated_step_draws_for_its_own_microbatches():
    x, y = data()
    found = []
    for fails in (False, True):
        stages = made(checkpointed=True)
        left = [1] if fails else []

        def short(output, target, left=left):
            if left:
                left.pop()
                raise MemoryError("planted")
            return F.mse_loss(output, target)

        pipe = Pipeline(list(stages), microbatches=2 if fails else 4, loss_fn=short)
        seed(9)
        assert pipe.step(x, y).pieces == 4
        found.append(gradients_of(stages))
    assert relative_difference(*found) == 0


def test_inference_that_draws_is_reproducible():
    x, _ = data()
    stages = made()
    pipe = pipe_of(stages)
    outputs = []
    for _ in range(3):
        seed(4)
        outputs.append(pipe.forward(x))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert not torch.equal(pipe.forward(x), outputs[0])
