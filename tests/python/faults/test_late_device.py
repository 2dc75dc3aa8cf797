"""Faults on devices that are late: control records in the last bucket, and between hosts, end steps alike."""

import ctypes
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from lost_ranks import CLEAN_UP_ONLY
from models import classes, cross_entropy, dropout_net, same_bits, seed, values_of, wrap
from rank_processes import raised
from record_transports import TRANSPORTS, over

import brimful

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
DELAY_US = 200  # of each piece of work, on the simulated device
STEPS = 3
POINTS = ["forward", 0, 5, 7]  # or the number of a gradient: 7 is that of the first layer
KINDS = {"memory": torch.OutOfMemoryError, "error": ValueError}


class Fault:
    """Raises once, in the second step of a run."""

    def __init__(self, model):
        self.due, self.count = None, 0
        model.module[3].register_forward_pre_hook(lambda *_: self.reached("forward"))
        for parameter in model.module.parameters():
            parameter.register_hook(self.on_gradient)

    def on_gradient(self, _):
        self.reached(self.count)
        self.count += 1

    def reached(self, point):
        if self.due is not None and self.due[0] == point:
            kind = self.due[1]
            self.due = None
            raise KINDS[kind]("planted")


def run(rank, model, fault, initial, due, with_sizer):
    model.module.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer) if with_sizer else None
    seed(rank.index)
    figures = []
    for step in range(STEPS):
        fault.count = 0
        fault.due = due if step == 1 else None
        batch = [t.cuda() for t in classes(8 + rank.index, seed=10 * step + rank.index)]

        def one(batch=batch):
            if sizer is not None:
                outcome = sizer.step(batch, cross_entropy)
                return figures.append((outcome.loss, outcome.split, outcome.retries))
            with model.step():
                cross_entropy(model, batch).backward()
            figures.append(("stood",))

        error = raised(one)
        if error is None:
            optimizer.step()
        else:
            figures.append((type(error).__name__, getattr(error, "rank", None)))
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in values_of(model).items()}, figures


def matrix_job(rank, with_sizer):
    os.environ.update(CLEAN_UP_ONLY)
    torch.cuda.set_device(rank.index)
    simulation = ctypes.CDLL(None)
    if hasattr(simulation, "sim_cuda_set_delay"):
        simulation.sim_cuda_set_delay(ctypes.c_long(DELAY_US))
    model = wrap(dropout_net().cuda(), process_group=dist.new_group(backend="nccl"))
    initial = {name: value.clone() for name, value in model.module.state_dict().items()}
    fault = Fault(model)
    found = {}
    for kind, point, failing in itertools.product(KINDS, POINTS, [(0,), (1,), (0, 1)]):
        due = (point, kind) if rank.index in failing else None
        found[kind, point, failing] = run(rank, model, fault, initial, due, with_sizer)
        rank.progress()
    return found, model.reducer.counters.host_exchanges


@pytest.mark.parametrize("with_sizer", [True, False], ids=["sizer", "plain"])
def test_steps_of_late_devices_end_alike(ranks, with_sizer):
    in_bucket, hosts = (ranks(over, transport, matrix_job, with_sizer) for transport in TRANSPORTS)
    for (expected, none), (found, exchanges) in zip(in_bucket, hosts, strict=True):
        assert none == 0 and exchanges >= STEPS * len(found)
        for case, (values, figures) in found.items():
            assert same_bits(values, expected[case][0]), case
            assert figures == expected[case][1], case
        assert any(figures[1][0] in ("RankFailed", "ValueError") for _, figures in found.values())
