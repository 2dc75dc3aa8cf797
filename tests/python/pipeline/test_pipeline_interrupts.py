"""Ctrl-C in a pipeline's step: it ends soon, with everything as before; a stage that hangs is abandoned."""

import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference, rng_states
from test_pipeline import data, net, whole
from torch import nn

import brimful
from brimful import Pipeline, split_sequential

pytestmark = pytest.mark.usefixtures("no_limit")


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's handler: workers of pytest-xdist ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_in(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def hooked(before_action, stages, **options):
    """A pipeline with something to call before each action."""
    made = brimful._C.Pipeline
    with mock.patch.object(
        brimful._C, "Pipeline", lambda **given: made(**{**given, "before_action": before_action})
    ):
        return Pipeline(stages, microbatches=3, loss_fn=F.mse_loss, **options)


@pytest.mark.parametrize("schedule, per_rank", [("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2)])
def test_an_interrupt_at_any_action_leaves_nothing_of_the_step(schedule, per_rank):
    model = net(2 * per_rank)
    stages = split_sequential(model, [2] * (2 * per_rank))
    norm = nn.BatchNorm1d(6, dtype=torch.float64)
    stages[0].add_module("norm", norm)
    reference = nn.Sequential(*stages)
    at, slow = [None], [False]

    def before_action(rank, index, action):
        if at[0] == (rank, index):
            at[0] = None
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.12 if slow[0] else 0)  # the others are cancelled, or have ended

    pipe = hooked(
        before_action, stages, schedule=schedule, devices=["cpu"] * 2, batch_norm="freeze"
    )
    x, y = data()
    pipe.step(x, y)
    expected = gradients_of(reference)
    orders = pipe.schedule().actions
    for rank, order in enumerate(orders):
        for index in range(len(order)):
            before = rng_states(), norm.running_mean.clone(), x.clone()
            at[0], slow[0] = (rank, index), index % 3 == 0
            with pytest.raises(KeyboardInterrupt):
                pipe.step(x, y)
            assert rng_states() == before[0]
            assert torch.equal(norm.running_mean, before[1]) and torch.equal(x, before[2])
            assert relative_difference(gradients_of(reference), expected) == 0
    reference.zero_grad()
    pipe.step(x, y)
    assert relative_difference(gradients_of(reference), expected) < 1e-12


def test_a_stage_of_python_stops_at_its_next_line():
    model, (x, y) = net(), data()
    lines = []

    def slow(h):
        for line in range(100):
            time.sleep(0.05)
            lines.append(line)
        return h

    stages = [*split_sequential(model, [2, 2])]
    quick = [True]
    pipe = Pipeline(
        [stages[0], lambda h: h if quick[0] else slow(h), stages[1]],
        microbatches=3,
        loss_fn=F.mse_loss,
    )
    _, expected = whole(model, x, y)
    quick[0] = False
    interrupt_in(0.3)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, y)
    assert time.monotonic() - began < 0.3 + 0.9 and len(lines) < 20
    assert all(p.grad is None for p in model.parameters())
    quick[0] = True
    for _ in range(2):  # and no thread is interrupted later
        pipe.step(x, y)
        assert relative_difference(gradients_of(model), expected) < 1e-12
        model.zero_grad()


class Held(torch.autograd.Function):
    """Waits for an event in its backward."""

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.event.reached.set()
        ctx.event.wait(30)
        return gradient, None


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_a_stage_that_hangs_is_abandoned(where):
    model, (x, y) = net(3), data()
    first, inner, last = split_sequential(model, [2, 2, 2])
    event, done = threading.Event(), threading.Event()
    event.reached = threading.Event()
    hangs = [where]

    def hang():
        event.reached.set()
        event.wait(30)
        done.set()

    def middle(h):
        if hangs[0] == "forward":
            hang()
        h = inner(h)
        return Held.apply(h, event) if hangs[0] == "backward" else h

    def loss_fn(output, target):
        if hangs[0] == "loss":
            hang()
        return F.mse_loss(output, target)

    torch.manual_seed(3)
    pipe = Pipeline([first, middle, last], microbatches=3, loss_fn=loss_fn)
    before, threads = rng_states(), len(os.listdir("/proc/self/task"))
    threading.Thread(
        target=lambda: (
            event.reached.wait(20),
            time.sleep(0.1),
            os.kill(os.getpid(), signal.SIGINT),
        )
    ).start()
    began = []
    watcher = threading.Thread(
        target=lambda: (event.reached.wait(20), began.append(time.monotonic()))
    )
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, y)
    watcher.join()
    assert time.monotonic() - began[0] < 2
    assert rng_states() == before
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"cannot be used any more.*make a new one"):
        pipe.step(x, y)
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        pipe.forward(x)
    hangs[0] = None
    _, expected = whole(model, x, y)
    fresh = Pipeline([first, middle, last], microbatches=3, loss_fn=F.mse_loss)
    fresh.step(x, y)
    event.set()
    del pipe
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # the abandoned threads end: all that they do late has been done
    assert len(os.listdir("/proc/self/task")) <= threads
    assert relative_difference(gradients_of(model), expected) < 1e-12
    model.zero_grad()
    fresh.step(x, y)
    assert relative_difference(gradients_of(model), expected) < 1e-12


def test_a_pipeline_is_cancelled_by_another_thread():
    model, (x, y) = net(), data()
    reached = threading.Event()

    def waits(h):
        reached.set()
        time.sleep(0.1)
        return h

    pipe = Pipeline([*split_sequential(model, [2, 2]), waits], microbatches=11, loss_fn=F.mse_loss)
    pipe.cancel()  # nothing is under way
    thread = threading.Thread(target=lambda: (reached.wait(20), pipe.cancel()))
    thread.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="cancelled"):
        pipe.step(x, y)
    thread.join()
    assert time.monotonic() - began < 0.8
    assert all(p.grad is None for p in model.parameters())
    pipe.forward(x[:1].repeat(11, 1))


def test_what_another_signals_handler_raises_ends_the_step():
    model, (x, y) = net(), data()

    def ring(number, frame):
        raise TimeoutError("rung")

    pipe = Pipeline(
        [*split_sequential(model, [2, 2]), lambda h: time.sleep(0.1) or h],
        microbatches=11,
        loss_fn=F.mse_loss,
    )
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="rung"):
            pipe.step(x, y)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert all(p.grad is None for p in model.parameters())


def test_a_program_with_an_abandoned_stage_ends():
    program = (
        "import os, signal, threading, time, torch, brimful\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "pipe = brimful.Pipeline([torch.nn.Linear(4, 4), lambda h: time.sleep(60) or h],\n"
        "                        microbatches=2, loss_fn=torch.nn.functional.mse_loss)\n"
        "try:\n    pipe.step(torch.ones(4, 4), torch.ones(4, 4))\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=40, text=True
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_an_abandoned_stage_that_ends_with_the_interpreter_ends_the_program_cleanly():
    program = (
        "import os, signal, sys, threading, time, torch, brimful\n"
        "reading, writing = os.pipe()\n"
        "class EndsLate:\n"
        "    def __del__(self, write=os.write, to=writing, sleep=time.sleep):\n"
        "        write(to, b'x')\n"
        "        sleep(1)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "pipe = brimful.Pipeline([torch.nn.Linear(4, 4), lambda h: os.read(reading, 1) and h],\n"
        "                        microbatches=2, loss_fn=torch.nn.functional.mse_loss)\n"
        "try:\n    pipe.step(torch.ones(4, 4), torch.ones(4, 4))\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
        "sys.modules['ends_late'] = EndsLate()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=40, text=True
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
