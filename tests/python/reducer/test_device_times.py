"""When devices, not hosts, did what a step's times are of: a slow device is the straggler."""

import contextlib
import ctypes
import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import wrap
from torch import nn

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
NAP_MS = 100
CYCLES_A_MS = 1 << 21  # at least, up to 2 GHz; two on the simulated device
simulation = ctypes.CDLL(None)
simulated = hasattr(simulation, "sim_cuda_pass_time")
WORK_MS = 60_000 if simulated else 2 * NAP_MS  # by the device's clock: no host is that late


def be_busy():
    """The device, for WORK_MS; the host goes on at once."""
    if simulated:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        simulation.sim_cuda_pass_time(stream, ctypes.c_long(1000 * WORK_MS))
    else:
        torch.cuda._sleep(WORK_MS * CYCLES_A_MS)


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, busy):
        if busy:
            be_busy()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(NAP_MS * CYCLES_A_MS)
        return gradient.clone(), None


class Net(nn.Module):
    def __init__(self, busy):
        super().__init__()
        self.first, self.last, self.busy = nn.Linear(16, 16), nn.Linear(16, 16), busy
        self.stream = None

    def forward(self, x):
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            return self.last(Late.apply(self.first(x).relu(), self.busy))


def end_of_step():
    """As of a loop that reads its loss."""
    torch.cuda.current_stream().synchronize()


def model_of(rank, backend, busy):
    torch.cuda.set_device(rank.index)
    torch.manual_seed(0)
    return wrap(Net(busy).cuda(), process_group=dist.new_group(backend=backend))


def times_job(rank, backend, slow):
    model = model_of(rank, backend, busy=rank.index == slow)
    x = torch.randn(8, 16, device="cuda")
    told = []
    for _ in range(3):
        F.mse_loss(model(x), x).backward()
        end_of_step()
        told.append(model.telemetry())
        model.zero_grad()
    return told


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_slow_device_is_the_straggler(ranks, backend):
    for steps in ranks(times_job, backend, 1):
        for times in steps[1:]:  # the first has the hosts'
            assert times["straggler"] == 1, steps
            assert times["straggler_ms"] > 0.75 * WORK_MS, steps


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_buckets_end_as_the_devices_end_them(ranks, backend):
    for steps in ranks(times_job, backend, None):
        for times in steps:
            first, last = times["buckets"][0], times["buckets"][-1]
            assert first["done_ms"] + NAP_MS / 2 < last["done_ms"] <= times["total_ms"], times
            assert first["launch_ms"] + NAP_MS / 2 < last["launch_ms"] <= last["done_ms"], times
            assert first["launch_ms"] <= first["done_ms"], times


def timed_steps_job(rank):
    torch.cuda.set_device(rank.index)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
    model = wrap(net, process_group=dist.new_group(backend="nccl"))
    x = torch.randn(8, 16, device="cuda")
    found = []
    for _ in range(34):
        with model.no_sync():
            model(x).square().mean().backward()  # a step with two forwards is timed as a whole
        model(x).square().mean().backward()
        end_of_step()
        found.append(model.telemetry())
        model.zero_grad()
    return found


def ahead_job(rank):
    """The host does not wait for the device, which needs longer than it."""
    model = model_of(rank, "nccl", busy=False)
    x = torch.randn(8, 16, device="cuda")
    for _ in range(6):
        F.mse_loss(model(x), x).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    return [(times.by_device, times.total_ms) for times in model.reducer.times()]


def test_times_of_a_device_that_is_behind_are_known_later(ranks):
    for steps in ranks(ahead_job):
        timed = [total_ms for by_device, total_ms in steps if by_device]
        assert timed and min(timed) > NAP_MS / 2, steps


def test_the_device_times_one_of_sixteen_steps(ranks):
    for steps in ranks(timed_steps_job):
        assert [n for n, times in enumerate(steps) if times["by_device"]] == [*range(10), 16, 32]
        for times in steps:
            for bucket in times["buckets"]:
                assert bucket["ready_ms"] <= bucket["launch_ms"] <= bucket["done_ms"]
                assert bucket["done_ms"] <= times["total_ms"]


def begins_elsewhere_job(rank):
    model = model_of(rank, "nccl", busy=rank.index == 1)
    x = torch.randn(8, 16, device="cuda")
    side, model.module.stream = torch.cuda.Stream(), torch.cuda.current_stream()
    told = []
    for step in range(5):
        elsewhere = rank.index == 1 and step == 1
        with torch.cuda.stream(side) if elsewhere else contextlib.nullcontext():
            if elsewhere:
                simulation.sim_cuda_hold(ctypes.c_void_p(side.cuda_stream))
            y = model(x)
        F.mse_loss(y, x).backward()
        end_of_step()
        told.append(model.telemetry())
        if elsewhere:
            side.synchronize()
        model.zero_grad()
    return told, model.reducer.chrome_trace()


@pytest.mark.skipif(not simulated, reason="holds a stream")
def test_a_step_whose_beginning_is_not_ordered_before_its_end_has_no_times_of_the_device(ranks):
    first, second = ranks(begins_elsewhere_job)
    for rank, (steps, trace) in enumerate([first, second]):
        slices = [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]
        assert all(math.isfinite(each["ts"] + each["dur"]) for each in slices)
        assert [times["straggler"] for times in steps[1:]] == [1, 0, 1, 1], steps
        for step, times in enumerate(steps):
            unknown = rank == 1 and step == 1
            for bucket in times["buckets"]:
                assert math.isnan(bucket["launch_ms"]) == unknown, steps
                assert math.isnan(bucket["done_ms"]) == unknown, steps
