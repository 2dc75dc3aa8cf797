"""A fault on any ranks at any point of a step, in processes with budgets and random numbers of their own."""

import itertools
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from models import (
    classes,
    cross_entropy,
    dropout_net,
    noisy_cross_entropy,
    rng_states,
    same_bits,
    seed,
    values_of,
    wrap,
)
from rank_processes import raised

import brimful

STEPS = 3
PARAMETERS = len(list(dropout_net().parameters()))
SOON_S = 2.0


def subsets(size):
    return [
        chosen
        for count in range(1, size + 1)
        for chosen in itertools.combinations(range(size), count)
    ]


@dataclass(frozen=True)
class Fault:
    """`point`: "forward", "end" (after the last gradient), or the number of the gradient hook of the step."""

    ranks: tuple[int, ...]
    point: str | int
    kind: str  # "budget" (a real shortage), "memory" (raised) or "error"
    step: int = 1


class Planter:
    """Plants one fault, once, into the hooks of a model and its loss function."""

    def __init__(self, model, fault, rank, pieces=1):
        self.fault = fault if fault is not None and rank in fault.ranks else None
        self.rank = rank
        self.step = 0
        self.fired = False
        self.hooks = 0
        self.last_backward = (pieces - 1) * PARAMETERS
        self.handles = [p.register_hook(self.on_gradient) for p in model.parameters()]

    def fire(self):
        self.fired = True
        if self.fault.kind == "budget":
            brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes)
        elif self.fault.kind == "memory":
            raise torch.OutOfMemoryError(f"planted shortage on rank {self.rank}")
        else:
            raise ValueError(f"planted error on rank {self.rank}")

    def due(self, point):
        fault = self.fault
        return fault and not self.fired and self.step == fault.step and fault.point == point

    def on_gradient(self, gradient):
        if self.hooks == self.last_backward and self.due("end"):
            torch.autograd.Variable._execution_engine.queue_callback(self.at_end)
        number = self.hooks
        self.hooks += 1
        if self.due(number):
            self.fire()

    def at_end(self):
        self.fire()
        torch.empty(1000)  # refused under a budget

    def loss(self, model, piece):
        self.lift()
        if self.due("forward"):
            self.fire()
        return noisy_cross_entropy(model, piece)

    def next_step(self):
        self.lift()
        self.step += 1
        self.hooks = 0

    def lift(self):
        brimful.memory.set_limit("cpu", None)

    def remove(self):
        for handle in self.handles:
            handle.remove()


def train(rank, model, initial, fault=None, splits=None, pieces=1):
    """Three steps on uneven batches; what they ended with. Continues behind a step that failed."""
    model.module.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizer = brimful.BatchSizer(model, optimizer, pieces=pieces)
    seed(rank.index)
    planter = Planter(model, fault, rank.index, pieces)
    outcomes, errors = [], {}
    for step in range(STEPS):
        batch = classes(8 + 3 * rank.index, seed=10 * step + rank.index)
        before = values_of(model), rng_states()

        def one_step(batch=batch, step=step):
            split = None if splits is None else splits[step]
            outcomes.append(sizer.step(batch, planter.loss, split=split))

        error = raised(one_step)
        planter.next_step()
        if error is None:
            optimizer.step()
        else:
            after = values_of(model), rng_states()
            assert same_bits(after[0], before[0]) and after[1] == before[1], fault
            errors[step] = error
        optimizer.zero_grad()
    planter.remove()
    return {
        "values": values_of(model),
        "rng": rng_states(),
        "splits": [outcome.split for outcome in outcomes],
        "retries": [outcome.retries for outcome in outcomes],
        "losses": [outcome.loss for outcome in outcomes],
        "attempts": [[(a.ran_out, a.buckets_left, a.alone) for a in o.attempts] for o in outcomes],
        "errors": errors,
        "fired": planter.fired,
    }


def require_equal_replicas(values, about):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, values)
    for other in everybody:
        assert same_bits(values, other), about


def memory_faults_job(rank, kinds, points, pieces):
    fired = retried = stood = 0
    model = wrap(dropout_net())
    initial = values_of(model)
    for kind, point, chosen in itertools.product(kinds, points, subsets(rank.size)):
        fault = Fault(chosen, point, kind)
        run = train(rank, model, initial, fault, pieces=pieces)
        assert not run["errors"], (fault, run["errors"])
        require_equal_replicas(run["values"], fault)
        replay = train(rank, model, initial, splits=run["splits"], pieces=pieces)
        assert replay["retries"] == [0] * STEPS, fault
        assert same_bits(run["values"], replay["values"]), fault
        assert run["rng"] == replay["rng"], fault
        assert run["losses"] == replay["losses"], fault
        if rank.index in chosen:
            assert run["fired"], fault
            ran_out = [entry for entry in run["attempts"][1] if rank.index in entry[0]]
            assert kind == "budget" or len(ran_out) == (point != "end"), (fault, run["attempts"])
        elif point == "forward":
            assert run["retries"][1] == 0, fault  # those who ran out did so alone
        fired += run["fired"]
        retried += run["retries"][1] > 0
        stood += run["retries"][1] == 0
    return fired, retried, stood


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("kind", ["memory", "budget"])
def test_memory_that_runs_out_anywhere_on_any_ranks_leaves_no_trace(ranks, kind, pieces):
    points = ["forward", *range(pieces * PARAMETERS), "end"]
    for fired, retried, stood in ranks(memory_faults_job, [kind], points, pieces, watchdog_s=60):
        assert fired == 2 * len(points)
        assert retried > len(points)
        assert stood > 0


def test_three_ranks_survive_a_shortage_on_any_of_them(ranks):
    points = ["forward", 0, PARAMETERS // 2, PARAMETERS - 1, "end"]
    ranks(memory_faults_job, ["memory", "budget"], points, 1, size=3, watchdog_s=60)
