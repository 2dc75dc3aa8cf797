"""Pipelines over NCCL: a rank dies or hangs, and the others, whose devices wait for its messages, raise RankFailed."""

import ctypes
import datetime
import itertools
import os
import signal
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lost_ranks import CLEAN_UP_ONLY, CYCLES_A_S, KINDS, at_once
from rank_processes import raised, run_script
from torch import nn

import brimful

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
SIMULATED = hasattr(ctypes.CDLL(None), "sim_cuda_calls")
pytestmark = [pytest.mark.gpu, two_devices]
TIMEOUT_S = 4  # of the process group
SOON_S = 2 * TIMEOUT_S + 4  # for a message, and for the verdict; and the machine may be busy
LOST_STEP = 2


def let_streams_run_late():
    """As a device's do; the simulated one else does inside a call what its stream has time for."""
    simulation = ctypes.CDLL(None)
    if hasattr(simulation, "sim_cuda_set_delay"):
        simulation.sim_cuda_set_delay(ctypes.c_long(100))


class Leaving(nn.Module):
    """A stage whose process is lost in the forward or backward of a microbatch: at once, or when its host has gone on
    and its device still computes what others wait for."""

    def __init__(self, inner, how, part, late, reads):
        super().__init__()
        self.inner, self.how, self.part, self.late, self.reads = inner, how, part, late, reads
        self.calls_left = None

    def lose(self):
        os.kill(os.getpid(), self.how)

    def leave(self):
        if not self.late:
            self.lose()
        torch.cuda._sleep(10 * CYCLES_A_S)
        threading.Timer(0.5, self.lose).start()

    def forward(self, x):
        leaves = self.calls_left == 0
        self.calls_left = None if self.calls_left is None or leaves else self.calls_left - 1
        if leaves and self.part == "forward":
            self.leave()
        if self.reads:
            x.sum().item()
        y = self.inner(x)
        if leaves and self.part == "backward":
            y.register_hook(lambda gradient: self.leave())
        return y


def lost_job(here, kind, environment, how, lost, part, late, microbatch, schedule):
    os.environ.update(environment, TORCH_DIST_USE_NCCL2=KINDS[kind])
    rank, device = here.index, torch.device("cuda", here.index)
    torch.cuda.set_device(device)
    let_streams_run_late()
    pids = [None] * here.size
    dist.all_gather_object(pids, os.getpid())
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl", timeout=timeout)
    torch.manual_seed(0)
    reads = schedule == "1f1b" and rank != lost  # behind gradients that came before its forward
    stage = Leaving(nn.Linear(8, 8), how, part, late, reads).to(device)
    pipe = brimful.Pipeline(
        [stage], group=group, schedule=schedule, microbatches=4, loss_fn=F.mse_loss
    )
    x, y = torch.randn(2, 8, 8)
    for step in range(LOST_STEP + 1):
        stage.zero_grad()
        if rank == lost and step == LOST_STEP:
            stage.calls_left = microbatch
        error = raised(pipe.step, x, y.to(device))
        if error is not None:
            break
    if how == signal.SIGSTOP:
        os.kill(pids[lost], signal.SIGKILL)
    again = raised(pipe.step, x, y.to(device))
    torch.cuda.synchronize()  # nothing waits on the device
    gradient = stage.inner.weight.grad
    del pipe
    F.mse_loss(stage.inner(x.to(device)), y.to(device)).backward()  # the process goes on
    torch.cuda.synchronize()
    return step, error, again, gradient is None


def require_failed(result):
    step, error, again, is_undone = result
    assert step == LOST_STEP, error
    assert type(error) is brimful.RankFailed, error
    assert "the pipeline's process group broke" in str(error), error
    assert error.seconds < SOON_S, (error.seconds, error)
    assert type(again) is brimful.RankFailed, again
    assert again.seconds < SOON_S, (again.seconds, again)
    assert is_undone


# The rank, where it leaves, whether its device is behind, in which microbatch, and the schedule.
PLACES = [
    (0, "forward", False, 1, "1f1b"),
    (0, "forward", True, 3, "gpipe"),  # rank 1 reads the loss
    (1, "backward", False, 1, "1f1b"),
    (1, "backward", True, 0, "1f1b"),  # rank 0 reads in its third forward
    (1, "backward", True, 3, "gpipe"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_ends_the_others_step(ranks, kind):
    def run(lost, *place):
        job = kind, CLEAN_UP_ONLY, signal.SIGKILL, lost, *place
        results = ranks(lost_job, *job, lost=(lost,), watchdog_s=40)
        require_failed(results[1 - lost])

    at_once([partial(run, *place) for place in PLACES])


def begin_chain(here):
    os.environ.update(CLEAN_UP_ONLY)
    device = torch.device("cuda", here.index % torch.cuda.device_count())  # simulated ones are two
    torch.cuda.set_device(device)
    let_streams_run_late()
    stage = Leaving(nn.Linear(8, 8), signal.SIGKILL, "backward", True, False).to(device)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    pipe = brimful.Pipeline([stage], group=group, microbatches=6, loss_fn=F.mse_loss)
    x, y = torch.randn(2, 12, 8).to(device)

    def step():
        return pipe.step(x, y)

    step()
    return stage, step


def chain_job(here):
    """Rank 0 reads behind rank 1's gradients, which wait for those of rank 2."""
    stage, step = begin_chain(here)
    stage.reads = here.index == 0
    stage.calls_left = 0 if here.index == 2 else None
    error = raised(step)
    torch.cuda.synchronize()
    return error


def stood_job(here):
    """Rank 1 dies when the step stands and its device has yet to send the last gradients."""
    stage, step = begin_chain(here)
    if here.index == 1:
        stage.lose = lambda: None
        stage.calls_left = 5
    step()
    if here.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(step)
    torch.cuda.synchronize()
    return error


three_devices = pytest.mark.skipif(
    not SIMULATED and torch.cuda.device_count() < 3, reason="needs three CUDA devices"
)


@three_devices
def test_a_rank_that_waits_for_one_that_waits_for_the_dead_one_is_informed(ranks):
    for error in ranks(chain_job, size=3, lost=(2,))[:2]:
        assert type(error) is brimful.RankFailed, error
        assert error.seconds < 5, (error.seconds, error)


@three_devices
def test_gradients_of_a_step_that_stood_and_did_not_arrive_are_said(ranks):
    errors = ranks(stood_job, size=3, lost=(1,))
    for error in errors[::2]:
        assert type(error) is brimful.RankFailed, error
        assert error.seconds < 5, (error.seconds, error)
    assert "gradients of an earlier step were still under way" in str(errors[0])
    assert "gradients of an earlier step were still under way" not in str(errors[2])


def replicas_job(here):
    """Of two replicas the first one's rank 0 dies, and its device still has what rank 1 waits for."""
    os.environ.update(CLEAN_UP_ONLY)
    replica, rank = divmod(here.index, 2)
    device = torch.device("cuda", here.index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    let_streams_run_late()
    groups = {
        each: dist.new_group(list(each), backend="cpu:gloo,cuda:nccl")
        for each in [(0, 1), (2, 3), (0, 2), (1, 3)]
    }
    stage = Leaving(nn.Linear(8, 8), signal.SIGKILL, "forward", True, False).to(device)
    wrapped = brimful.DistributedDataParallel(stage, process_group=groups[(rank, rank + 2)])
    group = groups[(2 * replica, 2 * replica + 1)]
    pipe = brimful.Pipeline(
        [wrapped], group=group, schedule="gpipe", microbatches=4, loss_fn=F.mse_loss
    )
    x, y = torch.randn(2, 8, 8)
    pipe.step(x, y.to(device))
    wrapped.zero_grad()
    stage.calls_left = 3 if here.index == 0 else None
    error = raised(pipe.step, x, y.to(device))
    torch.cuda.synchronize()
    return error, stage.inner.weight.grad is None


@pytest.mark.skipif(
    not SIMULATED and torch.cuda.device_count() < 4, reason="needs four CUDA devices"
)
def test_no_replica_takes_what_a_device_made_of_messages_that_did_not_arrive(ranks):
    for error, is_undone in ranks(replicas_job, size=4, lost=(0,), watchdog_s=40)[1:]:
        assert type(error) is brimful.RankFailed, error
        assert error.seconds < SOON_S, (error.seconds, error)
        assert is_undone


PROGRAM = """
import os, signal, sys, threading
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
import torch, brimful
from rank_processes import join_group
rank = int(sys.argv[1])
join_group(rank, 2, int(sys.argv[2]), 15)
torch.cuda.set_device(rank)
group = torch.distributed.new_group(backend="cpu:gloo,cuda:nccl")
loss_fn = torch.nn.functional.mse_loss
stage = torch.nn.Linear(8, 8).cuda()
pipe = brimful.Pipeline([stage], group=group, microbatches=4, loss_fn=loss_fn)
x, y = torch.randn(2, 8, 8).cuda()
pipe.step(x, y)
if rank == 0:
    torch.cuda._sleep(1 << 33)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    pipe.step(x, y)
except brimful.RankFailed as error:
    print("raised:", error, flush=True)
"""


def test_a_program_whose_peer_died_comes_to_its_end():
    results = run_script(PROGRAM, watchdog_s=30)
    assert results[0][0] == -signal.SIGKILL, results[0][1]
    assert results[1][0] == 0, results[1][1]
    assert "raised:" in results[1][1]


# As torch's watchdog is unless it is set otherwise: it would end the process at the timeout.
def test_a_rank_that_hangs_ends_the_others_step_before_the_watchdog_ends_their_process(ranks):
    def run(kind, lost, *place):
        job = kind, {}, signal.SIGSTOP, lost, *place
        results = ranks(lost_job, *job, lost=(lost,), watchdog_s=40)
        require_failed(results[1 - lost])

    places = itertools.product(KINDS, [PLACES[0], PLACES[1], PLACES[3]])
    at_once([partial(run, kind, *place) for kind, place in places])
