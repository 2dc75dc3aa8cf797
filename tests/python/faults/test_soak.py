"""Random faults in random steps of random models: no rank hangs, and the replicas end equal to the bit."""

import os
import random
import time
from collections import Counter

import pytest
import torch
from models import classes, cross_entropy, values_of
from rank_processes import raised

import brimful

STEPS_OF_A_MODEL = 50
FAULTS_PER_STEP = 0.1


class Norm(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) if len(x) > 1 else super().forward(torch.cat([x, x]))[:1]


class Net(torch.nn.Module):
    """Linear layers, perhaps with batch norm, dropout and a sparse embedding; some layers are left out at random."""

    def __init__(self, chance):
        super().__init__()
        width = chance.choice([3, 8, 17])
        self.words = torch.nn.Embedding(6, width, sparse=True) if chance.random() < 0.3 else None
        layers = [torch.nn.Linear(6, width)]
        for _ in range(chance.randint(0, 3)):
            layers.append(torch.nn.Linear(width, width))
            if chance.random() < 0.3:
                layers.append(Norm(width))
            if chance.random() < 0.3:
                layers.append(torch.nn.Dropout(0.2))
        self.layers = torch.nn.ModuleList(layers)
        self.last = torch.nn.Linear(width, 3)
        self.left_out = None

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number == 0 or number != self.left_out:
                x = torch.tanh(layer(x))
        if self.words is not None:
            x = x + self.words(torch.arange(len(x)) % 6)
        return self.last(x)


class Fault:
    """A fault of one step on this rank: `at` is "forward", "loss", or the number of a gradient."""

    def __init__(self, model):
        self.at = None
        self.kind = None
        self.count = 0
        self.model = model
        model.module.last.register_forward_pre_hook(lambda *_: self.reached("forward"))
        for parameter in model.module.parameters():
            parameter.register_hook(self.on_gradient)

    def arm(self, at, kind):
        self.at, self.kind, self.count = at, kind, 0

    def on_gradient(self, _):
        self.count += 1
        self.reached(self.count - 1)

    def reached(self, point):
        if self.at != point:
            return
        self.at = None
        if self.kind == "budget":
            brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes)
        elif self.kind == "memory":
            raise torch.OutOfMemoryError("planted")
        else:
            raise ValueError("planted")

    def loss(self, model, piece):
        brimful.memory.set_limit("cpu", None)
        loss = cross_entropy(model, piece)
        self.reached("loss")
        return loss


def draw_faults(chance, size, parameters):
    """For each rank its fault, (at, kind), or None."""
    faults = [None] * size
    kinds = ["memory", "memory", "error", "budget"]
    if chance.random() < FAULTS_PER_STEP * 1.1:  # some come too late to fire
        for rank in chance.sample(range(size), chance.randint(1, size)):
            at = chance.choice(["forward", "loss", chance.randrange(parameters)])
            faults[rank] = at, chance.choice(kinds)
    return faults


class Trial:
    """One model and its steps."""

    def __init__(self, rank, seed):
        self.rank, self.chance = rank, random.Random(seed)
        torch.manual_seed(seed)
        self.model = brimful.DistributedDataParallel(
            Net(self.chance), bucket_cap_mb=self.chance.choice([0.0002, 0.002, 1])
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.sizer = brimful.BatchSizer(
            self.model, self.optimizer, pieces=self.chance.choice([1, 1, 2])
        )
        self.with_sizer = self.chance.random() < 0.6
        self.fault = Fault(self.model)
        self.parameters = len(list(self.model.parameters()))

    def step(self, number, count):
        chance = self.chance
        faults = draw_faults(chance, self.rank.size, self.parameters)
        mine = faults[self.rank.index]
        self.fault.arm(*(mine or (None, None)))
        self.model.module.left_out = chance.choice([None, 1, 2])
        rows = [chance.randint(4, 9) for _ in range(self.rank.size)]
        empty = chance.random() < 0.05
        batch = classes(rows[self.rank.index], seed=number * 7 + self.rank.index)
        scope, accumulate = chance.random() < 0.5, chance.random() < 0.2
        if self.with_sizer:
            if empty and self.rank.index == 0 and self.rank.size > 1:
                batch = brimful.NO_DATA
            error = raised(self.sizer.step, batch, self.fault.loss)
        else:
            error = raised(self.plain, batch, scope, accumulate)
        brimful.memory.set_limit("cpu", None)
        planted = sum(fault is not None for fault in faults)
        count["faults"] += planted
        count["steps with a fault"] += planted > 0
        count["failed"] += error is not None
        if error is None:
            self.optimizer.step()
        elif not planted:
            raise error
        elif isinstance(error, brimful.RankFailed):
            assert faults[error.rank] is not None, (faults, error)
            count["heard"] += 1
        self.model.zero_grad()

    def plain(self, batch, scope, accumulate):
        def run():
            if accumulate:
                with self.model.no_sync():
                    cross_entropy(self.model, batch).backward()
            self.fault.loss(self.model, batch).backward()

        if not (scope or accumulate or self.fault.at in ("forward", "loss")):
            run()
            return
        # An error that is caught outside the synchronising backward is the scope's to report.
        with self.model.step():
            run()


def soak_job(rank, steps, seed):
    start, count = time.monotonic(), Counter()
    for first in range(0, steps, STEPS_OF_A_MODEL):
        trial = Trial(rank, seed + first)
        for number in range(first, min(first + STEPS_OF_A_MODEL, steps)):
            trial.step(number, count)
            count["steps"] += 1
        require_equal_replicas(trial.model, seed + first)
    return dict(count), time.monotonic() - start


def require_equal_replicas(model, about):
    mine = values_of(model)
    for name, value in mine.items():
        if not model_agrees_on(name):
            continue
        both = torch.stack([value.double(), -value.double()])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
        assert torch.equal(both[0], -both[1]), (about, name)


def model_agrees_on(name):
    """A step that failed on one rank only leaves that rank's BatchNorm statistics behind until the next one."""
    return "running" not in name and "num_batches" not in name


@pytest.mark.parametrize("size", [2, 3])
def test_random_faults_in_random_steps(ranks, size):
    steps = int(os.environ.get("BRIMFUL_SOAK_STEPS", "150"))
    results = ranks(soak_job, steps, 1, size=size, timeout_s=15, watchdog_s=60)
    assert results[0][0]["steps"] == steps
    assert results[0][0]["faults"] > steps // 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_random_faults(ranks, capsys):
    steps = {2: 6000, 3: 4000}
    faults = 0
    for size, count in steps.items():
        results = ranks(soak_job, count, 1000, size=size, timeout_s=30, watchdog_s=800)
        counted, seconds = results[0]
        faults += counted["faults"]
        with capsys.disabled():
            print(f"\nsoak: {size} ranks, {counted}, {seconds:.0f} s, no hang, replicas equal")
    assert faults >= 1000
