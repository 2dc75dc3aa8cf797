"""The same on devices, over NCCL and over gloo."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from rank_processes import raised
from sharded_models import Fault, Trial, reference, worst
from torch.distributed.device_mesh import DeviceMesh

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
CLOSE = 1e-5


def on_devices(rank, backend, offload=False):
    torch.cuda.set_device(rank.index)
    group = dist.new_group(backend="nccl") if backend == "nccl" else dist.group.WORLD
    trial = Trial(rank, mesh=DeviceMesh.from_group(group, "cuda"), offload=offload)
    assert trial.sizer._device.type == "cuda"
    bad = [] if worst(trial.expected, reference((4, 4), (0, 1))) < CLOSE else ["expected"]
    for at in range(5, trial.places, 37):
        rank.progress()
        trial.begin()
        with Fault(at if rank.index == at % 2 else -1):
            outcome = trial.step()
        if outcome.split != [2, 2] or worst(trial.result(), trial.expected) > CLOSE:
            bad.append(at)
    return bad, trial.sizer._sharded.drained


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_fault_at_an_operator_of_a_device(ranks, backend):
    for bad, drained in ranks(on_devices, backend):
        assert bad == []
        assert drained > 0


def test_shards_that_an_offload_policy_keeps_on_the_host(ranks):
    for bad, drained in ranks(on_devices, "nccl", True):
        assert bad == []
        assert drained > 0


def killed(rank):
    torch.cuda.set_device(rank.index)
    group = dist.new_group(backend="nccl")
    trial = Trial(rank, mesh=DeviceMesh.from_group(group, "cuda"))
    trial.begin()

    class Kill(Fault):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if self.count == 60 and rank.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def step():
        with Kill(-1):
            trial.step()

    began = time.monotonic()
    error = raised(step)
    return type(error).__name__, time.monotonic() - began


def test_a_rank_that_is_killed(ranks):
    (error, waited), _ = ranks(killed, lost=(1,))
    assert error == "RankFailed"
    assert waited < 8
