"""Faults on devices that are late: control records in the last bucket, and between hosts, end steps alike."""

import ctypes
import itertools
import os
import random

import pytest
import torch
import torch.distributed as dist
from lost_ranks import CLEAN_UP_ONLY, CYCLES_A_S
from models import classes, cross_entropy, dropout_net, same_bits, seed, values_of, wrap
from rank_processes import raised
from record_transports import TRANSPORTS, over

import brimful

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
DELAYS_US = (0, 50, 200, 400)  # of each piece of work, on the simulated device
STEPS = 3
NAP_S = 2  # of a device, in which a host makes its steps
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


simulation = ctypes.CDLL(None)


def be_late(chance):
    if hasattr(simulation, "sim_cuda_set_delay"):
        simulation.sim_cuda_set_delay(ctypes.c_long(chance.choice(DELAYS_US)))


def failing_ranks(size):
    """The first, the last, and both."""
    return [(0,), (size - 1,), (0, size - 1)] if size > 1 else [(0,)]


def matrix_job(rank, with_sizer):
    os.environ.update(CLEAN_UP_ONLY)
    torch.cuda.set_device(rank.index % torch.cuda.device_count())
    chance = random.Random(rank.index)
    model = wrap(dropout_net().cuda(), process_group=dist.new_group(backend="nccl"))
    initial = {name: value.clone() for name, value in model.module.state_dict().items()}
    fault = Fault(model)
    found = {}
    for kind, point, failing in itertools.product(KINDS, POINTS, failing_ranks(rank.size)):
        be_late(chance)
        due = (point, kind) if rank.index in failing else None
        found[kind, point, failing] = run(rank, model, fault, initial, due, with_sizer)
        rank.progress()
    return found, model.reducer.counters.host_exchanges


@pytest.mark.parametrize(
    ("size", "with_sizer"),
    [(1, True), (1, False), (2, True), (2, False), (3, True), (4, False)],
    ids=["1-sizer", "1-plain", "2-sizer", "2-plain", "3-sizer", "4-plain"],
)
def test_steps_of_late_devices_end_alike(ranks, size, with_sizer):
    in_bucket, hosts = (
        ranks(over, transport, matrix_job, with_sizer, size=size) for transport in TRANSPORTS
    )
    for (expected, none), (found, exchanges) in zip(in_bucket, hosts, strict=True):
        assert none == 0 and exchanges >= (STEPS * len(found) if size > 1 else 0)
        for case, (values, figures) in found.items():
            assert same_bits(values, expected[case][0]), case
            assert figures == expected[case][1], case
        assert any(figures[1][0] in ("RankFailed", "ValueError") for _, figures in found.values())


class Training:
    """Steps of a model that is the same each time it is made."""

    def __init__(self, rank, with_sizer, group):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 3),
        )
        self.rank, self.model = rank, wrap(net.cuda(), process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sizer = brimful.BatchSizer(self.model, self.optimizer) if with_sizer else None
        self.batches = [
            [t.cuda() for t in classes(8, seed=10 * number + rank.index)] for number in range(4)
        ]

    def step(self, number):
        batch = self.batches[number % len(self.batches)]
        if self.sizer is not None:
            self.sizer.step(batch, cross_entropy)
        else:
            cross_entropy(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def asleep_job(rank, with_sizer):
    os.environ.update(CLEAN_UP_ONLY)
    torch.cuda.set_device(rank.index)
    found = []
    for asleep in (True, False):
        training = Training(rank, with_sizer, dist.new_group(backend="nccl"))
        for number in range(12):  # in which times are taken, and a plan
            training.step(number)
        torch.cuda.synchronize()
        if asleep:
            torch.cuda._sleep(NAP_S * CYCLES_A_S)
        begun = torch.cuda.Event()
        begun.record()
        for number in range(3):
            training.step(number)
        ahead = not begun.query()
        torch.cuda.synchronize()
        found.append({name: t.cpu() for name, t in values_of(training.model).items()})
        assert ahead == asleep
    return found


@pytest.mark.parametrize("with_sizer", [True, False], ids=["sizer", "plain"])
@pytest.mark.parametrize("size", [1, 2])
def test_three_steps_end_while_the_device_has_done_nothing(ranks, size, with_sizer):
    for found, expected in ranks(asleep_job, with_sizer, size=size):
        assert same_bits(found, expected)
