"""A pipeline whose ranks are processes over gloo."""

import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from rank_processes import raised
from torch import nn

import brimful


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(11, 6, generator=generator, dtype=torch.float64) for _ in range(2)]


class Planted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.at, self.error = inner, 0, None, None
        self.interrupts = False

    def forward(self, x):
        if self.interrupts:
            self.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
        self.calls += 1
        if self.calls - 1 == self.at:
            raise self.error
        return self.inner(x)


def expected_gradients(model):
    x, y = data()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return loss.item(), gradients


def close(model, gradients, rank):
    own = {name: g for name, g in gradients_of(model).items() if int(name[0]) // 2 == rank}
    return relative_difference(own, {name: gradients[name] for name in own}) < 1e-12


def pipeline_of(stages, rank, schedule="1f1b"):
    return brimful.Pipeline(
        [stages[rank]],
        group=torch.distributed.group.WORLD,
        schedule=schedule,
        microbatches=4,
        loss_fn=F.mse_loss,
    )


def train(here, schedule):
    rank = here.index
    model = net()
    loss, gradients = expected_gradients(model)
    stages = brimful.split_sequential(model, [2, 2])
    pipe = pipeline_of(stages, rank, schedule)
    x, y = data()
    outcome = pipe.step(x, y)
    assert outcome.loss == pytest.approx(loss, rel=1e-12)
    assert close(model, gradients, rank)
    out = pipe.forward(x)
    with torch.no_grad():
        assert out is None if rank == 0 else torch.allclose(out, model(x), 1e-12)
    model.zero_grad()
    x.requires_grad_()
    (of_x,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
    pipe.step(x, y)  # the first rank's input alone counts
    assert close(model, gradients, rank)
    assert x.grad is None if rank == 1 else torch.allclose(x.grad, of_x, 1e-12)
    x.grad = None
    model.zero_grad()
    front = x + 0
    if rank == 0:
        front.register_hook(refuse_in_front)
    with pytest.raises(KeyError if rank == 0 else brimful.RankFailed, match="in front"):
        pipe.step(front, y)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    return True


def refuse_in_front(gradient):
    raise KeyError("in front")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_processes_give_the_gradients_of_the_whole_model(ranks, schedule):
    assert ranks(train, schedule) == [True, True]


def fail(here):
    rank = here.index
    model = net()
    _, gradients = expected_gradients(model)
    stages = [Planted(stage) for stage in brimful.split_sequential(model, [2, 2])]
    pipe = pipeline_of(stages, rank)
    x, y = data()
    for failing in range(2):
        for microbatch in range(4):
            stage = stages[rank]
            stage.calls, stage.at = 0, microbatch if rank == failing else None
            stage.error = KeyError("planted")
            began = time.monotonic()
            wanted = KeyError if rank == failing else brimful.RankFailed
            with pytest.raises(wanted, match="planted"):
                pipe.step(x, y)
            assert time.monotonic() - began < 1
            stage.at = None
            pipe.step(x, y)
            assert close(model, gradients, rank)
            model.zero_grad()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for failing in range(2):
        stages[rank].interrupts = rank == failing
        with pytest.raises(KeyboardInterrupt if rank == failing else brimful.RankFailed):
            pipe.step(x, y)
        assert all(parameter.grad is None for parameter in model.parameters())
        pipe.step(x, y)
        assert close(model, gradients, rank)
        model.zero_grad()
    stages[rank].calls, stages[rank].at = 0, 1 if rank == 0 else None
    stages[rank].error = torch.OutOfMemoryError("planted")
    outcome = pipe.step(x, y)
    assert (outcome.retries, outcome.pieces) == (1, 8)
    assert close(model, gradients, rank)
    return True


def test_a_failure_in_one_process_is_raised_or_repeated_in_all(ranks):
    assert ranks(fail) == [True, True]


def grow(here):
    rank = here.index
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, dtype=torch.float64) for _ in range(4)))
    x = torch.randn(4096, 128, dtype=torch.float64)
    F.mse_loss(model(x), x).backward()
    gradients = gradients_of(model)
    model.zero_grad()
    pipe = pipeline_of(brimful.split_sequential(model, [2, 2]), rank)
    pipe.step(x, x)
    before = brimful.memory.stats("cpu").used_bytes
    peak = pipe.step(x, x).peak_bytes
    if rank == 1:
        brimful.memory.set_limit("cpu", before + (peak - before) // 2)
    shrunk = pipe.step(x, x)
    assert shrunk.retries > 0 and shrunk.pieces > 4
    later = [pipe.step(x, x) for _ in range(8)]
    assert [outcome.retries for outcome in later] == [0] * 8
    assert [outcome.pieces for outcome in later] == [shrunk.pieces] * 8
    if rank == 1:
        brimful.memory.set_limit("cpu", before + 4 * (peak - before))
    model.zero_grad()
    outcome = pipe.step(x, x)
    assert (outcome.pieces, outcome.retries) == (4, 0)
    assert close(model, gradients, rank)
    brimful.memory.set_limit("cpu", None)
    return True


def test_the_microbatches_of_processes_grow_again_when_the_rank_that_ran_out_has_room(ranks):
    assert ranks(grow) == [True, True]


class Plan:
    """Fails one of this rank's actions, once."""

    def __init__(self):
        self.at, self.error = None, None

    def __call__(self, rank, index, action):
        if index == self.at:
            self.at = None
            raise self.error


def planned_pipeline(stages, rank, schedule):
    """A pipeline, and the plan that its ranks follow before each action."""
    plan, made = Plan(), brimful._C.Pipeline
    with mock.patch.object(
        brimful._C, "Pipeline", lambda **given: made(**{**given, "before_action": plan})
    ):
        return pipeline_of(stages, rank, schedule), plan


def fail_everywhere(here, schedule):
    rank = here.index
    model = net()
    _, gradients = expected_gradients(model)
    stages = brimful.split_sequential(model, [2, 2])
    x, y = data()
    pipe, plan = planned_pipeline(stages, rank, schedule)
    order = pipe.schedule().actions
    slowest = 0.0
    for failing in range(2):
        for index, action in enumerate(order[failing]):
            plan.at, plan.error = index if rank == failing else None, KeyError("planted")
            error = raised(pipe.step, x, y)
            assert type(error) is (KeyError if rank == failing else brimful.RankFailed), action
            words = error.__notes__[0] if rank == failing else str(error)
            assert f"stage {action[0]}" in words and f"microbatch {action[-1]}" in words, words
            slowest = max(slowest, error.seconds)
            assert all(p.grad is None for p in model.parameters())
            pipe.step(x, y)
            assert close(model, gradients, rank), action
            model.zero_grad()
    for failing in range(2):
        for index, action in enumerate(order[failing]):
            pipe, plan = planned_pipeline(stages, rank, schedule)  # that has not run out before
            plan.at = index if rank == failing else None
            plan.error = torch.OutOfMemoryError("planted")
            began = time.monotonic()
            outcome = pipe.step(x, y)
            slowest = max(slowest, time.monotonic() - began)
            assert (outcome.retries, outcome.pieces) == (1, 8), action
            assert close(model, gradients, rank), action
            model.zero_grad()
    return slowest


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_every_action_may_fail_in_either_process(ranks, schedule):
    assert max(ranks(fail_everywhere, schedule, watchdog_s=60)) < 1


def refuse_late(here):
    """What is refused leaves the gradients of the steps before."""
    rank = here.index
    model = net()
    _, gradients = expected_gradients(model)
    pipe = pipeline_of(brimful.split_sequential(model, [2, 2]), rank)
    x, y = data()
    pipe.step(x, y)
    for refusing in range(2):
        assert raised(pipe.step, x[: 3 if rank == refusing else None], y) is not None
        assert close(model, gradients, rank)
    return True


def test_gradients_of_earlier_steps_outlive_a_refused_one(ranks):
    assert ranks(refuse_late) == [True, True]


def short(here, schedule):
    """The last batch of an epoch has fewer rows than microbatches."""
    rank = here.index
    model = net()
    pipe = pipeline_of(brimful.split_sequential(model, [2, 2]), rank, schedule)
    x, y = data()
    for rows in (11, 3, 11, 1, 2):
        loss = F.mse_loss(model(x[:rows]), y[:rows])
        loss.backward()
        gradients = gradients_of(model)
        model.zero_grad()
        outcome = pipe.step(x[:rows], y[:rows])
        assert outcome.pieces == min(rows, 4)
        assert outcome.loss == pytest.approx(loss.item(), rel=1e-12)
        assert close(model, gradients, rank)
        model.zero_grad()
        out = pipe.forward(x[:rows])
        assert (out is None) == (rank == 0)
        assert rank == 0 or torch.allclose(out, model(x[:rows]))
    return True


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_short_last_batch_has_fewer_microbatches_in_processes(ranks, schedule):
    assert ranks(short, schedule) == [True, True]


def refuse(here):
    """A batch that is too small for the microbatches, on one rank alone: the others have more rows."""
    rank = here.index
    model = net()
    _, gradients = expected_gradients(model)
    pipe = pipeline_of(brimful.split_sequential(model, [2, 2]), rank)
    x, y = data()
    for refusing in range(2):
        rows = 3 if rank == refusing else len(x)
        began = time.monotonic()
        with pytest.raises((ValueError, brimful.RankFailed), match="batches of different sizes"):
            pipe.step(x[:rows], y[:rows])
        assert time.monotonic() - began < 1
        pipe.step(x, y)
        assert close(model, gradients, rank)
        model.zero_grad()
    return True


def test_what_is_wrong_before_the_first_action_reaches_the_other_process(ranks):
    assert ranks(refuse) == [True, True]


class Dying(nn.Module):
    def forward(self, x):
        os.kill(os.getpid(), signal.SIGKILL)
        return x


def die(here, lost):
    rank = here.index
    stages = [*brimful.split_sequential(net(), [1, 2, 1])]
    if rank == lost:
        stages[rank].append(Dying())
    pipe = pipeline_of(stages, rank)
    began = time.monotonic()
    with pytest.raises(brimful.RankFailed, match="broke"):
        pipe.step(*data())
    seconds = time.monotonic() - began
    time.sleep(3)  # the others must not live on this one's end
    return seconds


@pytest.mark.parametrize("lost", range(3))
def test_when_a_process_dies_the_others_do_not_wait_for_each_other(ranks, lost):
    seconds = ranks(die, lost, size=3, timeout_s=60, lost=(lost,))
    assert seconds.pop(lost) is None
    assert max(seconds) < 3
