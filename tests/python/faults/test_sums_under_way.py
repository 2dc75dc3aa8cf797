"""A step over NCCL ends when the hosts have met: ranks that die before their devices have made the sums."""

import ctypes
import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from lost_ranks import CLEAN_UP_ONLY, CYCLES_A_S, KINDS
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import raised

import brimful

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
TIMEOUT_S = 60  # of the process group: much longer than it takes to notice
SOON_S = 8
UNKNOWN = "the sums of step 1 had not ended, so that its update is not known: load a checkpoint"


def model_over_nccl(rank, kind):
    os.environ.update(CLEAN_UP_ONLY, TORCH_DIST_USE_NCCL2=KINDS[kind])
    torch.cuda.set_device(rank.index)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    return wrap(dropout_net().cuda(), process_group=dist.new_group(backend="nccl", timeout=timeout))


class Nap:
    """The device sleeps when the last gradient of an armed step has come: its sums wait for that, the host does not."""

    def __init__(self, model, seconds):
        self.seconds, self.armed = seconds, False
        model.module[0].weight.register_hook(self)

    def __call__(self, _):
        if self.armed:
            torch.cuda._sleep(self.seconds * CYCLES_A_S)


def killed_job(rank, kind, place):
    model = model_over_nccl(rank, kind)
    nap = Nap(model, 3)
    x = classes(8)[0].cuda()  # a copy waits for the device
    for step in range(2):
        nap.armed = (rank.index, step) == (1, 1)
        cross_entropy(model, [t.cuda() for t in classes(8, seed=step)]).backward()
    if rank.index == 1:
        if place == "behind its optimizer":
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        elif place == "in the next forward":
            model.eval()(x)  # the simulated device waits for what dropout draws
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    torch.cuda.synchronize()  # as a program does that reads its loss
    waited_s = time.monotonic() - began
    saved = raised(model.state_dict)
    inner = raised(model.module.state_dict)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = raised(optimizer.step)
    others = torch.nn.Parameter(torch.ones(1))
    others.grad = torch.ones(1)
    torch.optim.SGD([others], lr=0.5).step()
    assert others.item() == 0.5
    again = raised(lambda: cross_entropy(model, [t.cuda() for t in classes(8)]).backward())
    return waited_s, [saved, inner, stepped, again]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("classic", "at once"),
        ("nccl2", "at once"),
        ("classic", "behind its optimizer"),
        ("nccl2", "in the next forward"),
    ],
)
def test_a_rank_that_dies_behind_its_verdict_leaves_nobody_waiting_and_nothing_to_save(
    ranks, kind, place
):
    waited_s, errors = ranks(killed_job, kind, place, lost=(1,), watchdog_s=40)[0]
    assert waited_s < SOON_S
    for error in errors:
        assert type(error) is brimful.RankFailed, errors
    assert UNKNOWN in str(errors[0]), errors


def ended_job(rank, kind):
    """Rank 0 ends its program while the other's device is still busy with the last sums."""
    model = model_over_nccl(rank, kind)
    for step in range(3):
        cross_entropy(model, [t.cuda() for t in classes(8, seed=step)]).backward()
    torch.cuda.synchronize()
    expected = [p.grad.clone() for p in model.parameters()]
    if rank.index == 0:
        del model
        return None
    time.sleep(2)  # the connections have ended
    torch.cuda.synchronize()
    state = raised(model.state_dict)
    return state, all(
        torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_leaves_at_its_end_is_no_dead_one(ranks, kind):
    _, (state, alike) = ranks(ended_job, kind, watchdog_s=40)
    assert state is None and alike


def busy_job(rank):
    model = model_over_nccl(rank, "classic")
    nap = Nap(model, 3)
    cross_entropy(model, [t.cuda() for t in classes(8)]).backward()  # what is made once is there
    model.zero_grad()
    batch = [t.cuda() for t in classes(8)]
    nap.armed = True
    began = time.monotonic()
    cross_entropy(model, batch).backward()
    host_s = time.monotonic() - began
    torch.cuda.synchronize()
    return host_s, time.monotonic() - began, [p.grad.cpu() for p in model.parameters()]


def test_a_step_ends_while_its_device_is_busy(ranks):
    results = ranks(busy_job, watchdog_s=60)
    for host_s, device_s, gradients in results:
        assert host_s < 2 < device_s, (host_s, device_s)
        torch.testing.assert_close(gradients, results[0][2], rtol=0, atol=0)


ILLEGAL_ADDRESS = 700
simulation = ctypes.CDLL(None)


def lost_device_job(rank, kind):
    os.environ.update(
        TORCH_NCCL_RETHROW_CUDA_ERRORS="0"
    )  # else the classic group's watchdog ends the process
    model = model_over_nccl(rank, kind)
    nap = Nap(model, 3)
    for step in range(2):
        nap.armed = (rank.index, step) == (1, 1)
        cross_entropy(model, [t.cuda() for t in classes(8, seed=step)]).backward()
    if rank.index == 1:
        simulation.sim_cuda_plant_error(1, ILLEGAL_ADDRESS)
    saved = raised(model.state_dict)
    stepped = raised(torch.optim.SGD(model.parameters(), lr=0.1).step)
    if rank.index == 1:
        simulation.sim_cuda_plant_error(1, 0)
    return saved, stepped


@pytest.mark.skipif(not hasattr(simulation, "sim_cuda_plant_error"), reason="plants an error")
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_lost_behind_its_verdict_leaves_nothing_to_save(ranks, kind):
    for errors in ranks(lost_device_job, kind, watchdog_s=40):
        for error in errors:
            assert type(error) is brimful.RankFailed, errors
            assert UNKNOWN in str(error), errors
            assert error.seconds < SOON_S
