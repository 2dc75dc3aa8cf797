"""A rank that is asked to stop: all end their training behind the same step, and exit with the code of the signal."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.nn.functional as F
from models import classes, cross_entropy, same_bits, values_of, wrap
from torch import nn

import brimful

STEPS = 40


@pytest.fixture(autouse=True)
def no_request():
    brimful.clear_stop()
    yield
    brimful.clear_stop()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def ask(here, step, at, how):
    if step == at and here.index == here.size - 1:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            brimful.request_stop()


def train_with_sizer(here, at, how):
    brimful.stop_on(signal.SIGUSR1)
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    outcomes = []
    for step, batch in enumerate(sizer.batches([classes(8, seed=s) for s in range(STEPS)])):
        ask(here, step, at, how)
        outcomes.append(sizer.step(batch, cross_entropy))
        optimizer.step()
        optimizer.zero_grad()
    again = sum(1 for _ in sizer.batches([classes(8)]))
    return (
        len(outcomes),
        [outcome.stop for outcome in outcomes],
        outcomes[-1].last,
        brimful.stop_requested(),
        brimful.stop_exit_code(),
        again,
        sizer.state_dict()["consumed"],
        values_of(model),
    )


@pytest.mark.parametrize("how, code", [("signal", 128 + signal.SIGUSR1), ("call", 0)])
@pytest.mark.parametrize("at", [0, 7])
def test_all_ranks_end_their_loop_behind_the_same_step(ranks, at, how, code):
    ended = ranks(train_with_sizer, at, how, size=3)
    for steps, stops, last, requested, exit_code, again, consumed, values in ended:
        assert steps == consumed == at + 1
        assert stops == [False] * at + [True]
        assert last and requested and exit_code == code
        assert again == 0  # no loop begins while the request stands
        assert same_bits(values, ended[0][-1])


def train_on(here):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    counts = []
    for request in (True, False):
        if request:
            brimful.request_stop()
        counts.append(0)
        for batch in sizer.batches([classes(8)] * 3):
            sizer.step(batch, cross_entropy)
            model.zero_grad()
            counts[-1] += 1
        brimful.clear_stop()
    return counts


def test_training_goes_on_once_the_request_is_forgotten(ranks):
    assert ranks(train_on) == [[0, 3]] * 2


def train_in_plain_loop(here, at, how):
    brimful.stop_on(signal.SIGUSR1)
    model = wrap(net())
    stops = []
    for step in range(STEPS):
        ask(here, step, at, how)
        cross_entropy(model, classes(8, seed=step)).backward()
        model.zero_grad()
        stops.append(model.stop)
        if model.stop:
            break
    return stops, brimful.stop_exit_code()


@pytest.mark.parametrize("at, size", [(0, 2), (5, 2), (5, 1)])
def test_a_plain_loop_learns_of_it_from_the_step(ranks, at, size):
    expected = [False] * at + [True], 128 + signal.SIGUSR1
    assert ranks(train_in_plain_loop, at, "signal", size=size) == [expected] * size


def test_a_single_rank_stops_too():
    model = net()
    sizer = brimful.BatchSizer(model)
    steps = 0
    for batch in sizer.batches([classes(8)] * STEPS):
        if steps == 2:
            brimful.request_stop(signal.SIGTERM)
        stopped = sizer.step(batch, cross_entropy).stop
        model.zero_grad()
        steps += 1
        assert stopped == (steps == 3)
    assert steps == 3
    assert brimful.stop_exit_code() == 143
    brimful.clear_stop()
    assert brimful.stop_exit_code() == 0


def train_pipeline(here, at):
    stages = [nn.Linear(6, 6), nn.Linear(6, 6)]
    pipeline = brimful.Pipeline(
        [stages[here.index]],
        group=torch.distributed.group.WORLD,
        microbatches=2,
        loss_fn=F.mse_loss,
    )
    stops = []
    for step in range(STEPS):
        if step == at and here.index == 0:
            brimful.request_stop(signal.SIGTERM)
        outcome = pipeline.step(torch.ones(4, 6), torch.zeros(4, 6))
        stages[here.index].zero_grad()
        stops.append(outcome.stop)
        if outcome.stop:
            break
    return stops, brimful.stop_exit_code()


@pytest.mark.parametrize("at", [0, 3])
def test_the_ranks_of_a_pipeline_stop_behind_the_same_step(ranks, at):
    assert ranks(train_pipeline, at) == [([False] * at + [True], 143)] * 2


def test_a_signal_that_cannot_be_handled_is_refused():
    for number in (signal.SIGKILL, 0, -1, 64, 1000):
        with pytest.raises(ValueError, match=f"cannot be handled .signal: {int(number)}"):
            brimful.stop_on(number)


PROGRAM = """
    import os, signal, sys, time
    import brimful
    brimful.stop_on(signal.SIGTERM, signal.SIGTERM)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(7)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert not brimful.stop_requested()
    print(os.WTERMSIG(status), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print(brimful.stop_exit_code(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_a_second_signal_and_a_forked_child_end_as_before():
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == ["15", "143"], run
    assert run.returncode == -signal.SIGTERM


WORKER = """
    import os, pathlib, signal, sys
    import torch, torch.distributed as dist
    import brimful

    dist.init_process_group("gloo")
    brimful.stop_on(signal.SIGTERM)
    folder = pathlib.Path(sys.argv[1])
    model = brimful.DistributedDataParallel(torch.nn.Linear(4, 1))
    sizer = brimful.BatchSizer(model)
    steps = 0
    for batch in sizer.batches(torch.ones(8, 4) for _ in range(10**9)):
        sizer.step(batch, lambda model, x: model(x).mean())
        model.zero_grad()
        steps += 1
        (folder / f"began{dist.get_rank()}").touch()
    brimful.save_on_rank0({"steps": steps}, folder / "saved.pt")
    (folder / f"steps{dist.get_rank()}").write_text(str(steps))
    sys.exit(brimful.stop_exit_code())
"""


def test_torchrun_that_is_ended_lets_its_workers_save(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(WORKER))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(program)]
    with subprocess.Popen(
        [*command, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"began{rank}").exists() for rank in range(2)):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=60)
    steps = [int((tmp_path / f"steps{rank}").read_text()) for rank in range(2)]
    assert steps[0] == steps[1] == torch.load(tmp_path / "saved.pt")["steps"] > 0, output
