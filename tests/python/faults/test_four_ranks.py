"""The fault matrix over four ranks: every rank, every pair, with a sizer and in a plain loop."""

import itertools

import pytest
import test_faults
import torch
import torch.distributed as dist
from models import (
    FaultOnce,
    Words,
    classes,
    cross_entropy,
    gradients_of,
    same_bits,
    two_nets,
    words_batch,
)
from rank_processes import raised
from test_faults import PARAMETERS, errors_job, memory_faults_job, plain_job

import brimful

SIZE = 4
WATCHDOG_S = 100
POINTS = [
    "forward",
    0,
    PARAMETERS - 1,
]  # before any bucket was launched, before the first has, behind the first
SOON_S = 2.0


def every_rank_and_pair(ranks):
    counts = (1, 2)
    return [chosen for count in counts for chosen in itertools.combinations(ranks, count)]


def with_pairs(rank, job, *args):
    test_faults.subsets = every_rank_and_pair  # in this rank's process
    return job(rank, *args)


@pytest.mark.parametrize(
    "absent", [(), (0,), (3,)], ids=["all have data", "0 has none", "3 has none"]
)
def test_memory_that_runs_out_leaves_no_trace(ranks_over_each, absent):
    job = memory_faults_job, ["memory"], POINTS, 1, absent
    ranks_over_each(with_pairs, *job, size=SIZE, watchdog_s=WATCHDOG_S)


def test_a_budget_that_is_too_small_leaves_no_trace(ranks_over_each):
    job = memory_faults_job, ["budget"], [*POINTS, "end"], 1
    ranks_over_each(with_pairs, *job, size=SIZE, watchdog_s=WATCHDOG_S)


@pytest.mark.parametrize("absent", [(), (0,)], ids=["all have data", "0 has none"])
def test_an_exception_raises_on_all_and_the_next_step_works(ranks_over_each, absent):
    ranks_over_each(
        with_pairs, errors_job, [*POINTS, "end"], absent, size=SIZE, watchdog_s=WATCHDOG_S
    )


@pytest.mark.parametrize("scope", [True, False], ids=["scope", "no scope"])
def test_in_a_plain_loop_a_fault_raises_on_all_and_the_next_step_works(ranks_over_each, scope):
    job = plain_job, ["memory", "error"], POINTS, scope
    ranks_over_each(with_pairs, *job, size=SIZE, watchdog_s=WATCHDOG_S)


def accumulating_job(rank):
    """A fault under no_sync, or in the backward that ends it: gradients of all pieces are dropped on all ranks."""
    module = two_nets()[0]
    model = brimful.DistributedDataParallel(module, bucket_cap_mb=0.0001)
    fault = FaultOnce(model.parameters())
    whole = None
    for faulty, at in itertools.product([None, *range(rank.size)], [0, 3, 4, 7]):

        def step():
            with model.step():
                with model.no_sync():
                    cross_entropy(model, classes(4, seed=rank.index)).backward()
                cross_entropy(model, classes(4, seed=9 + rank.index)).backward()

        fault.arm(at if rank.index == faulty else None)
        error = raised(step)
        fault.arm(None)
        if faulty is None:
            assert error is None
            whole = whole or gradients_of(model)
        elif rank.index == faulty:
            assert type(error) is torch.OutOfMemoryError, (faulty, at, error)
        else:
            assert type(error) is brimful.RankOutOfMemory and error.rank == faulty, (at, error)
            assert error.seconds < SOON_S
        model.zero_grad()
        step()
        assert same_bits(gradients_of(model), whole), (faulty, at)
        model.zero_grad()


def test_a_fault_while_gradients_accumulate_raises_on_all(ranks_over_each):
    ranks_over_each(accumulating_job, size=SIZE, watchdog_s=WATCHDOG_S)


def several_job(rank):
    """Two modules in a step, one of them with sparse gradients."""
    models = [
        brimful.DistributedDataParallel(net, bucket_cap_mb=0.0001)
        for net in (Words(True), two_nets()[0])
    ]
    fault = FaultOnce([p for model in models for p in model.parameters()])
    fired = 0

    def loss(models, piece):
        tokens, labels = piece
        return cross_entropy(models[0], piece) + cross_entropy(
            models[1], (tokens.repeat(1, 2)[:, :6].float(), labels)
        )

    for faulty, at in itertools.product(range(rank.size), range(9)):
        fault.arm(at if rank.index == faulty else None)
        brimful.BatchSizer(models).step(words_batch(5 + rank.index, rank.index), loss)
        fired += fault.fired
        for model in models:
            gradients = {n: g.to_dense() for n, g in gradients_of(model).items()}
            everybody = [None] * rank.size
            dist.all_gather_object(everybody, gradients)
            assert all(same_bits(gradients, other) for other in everybody), (faulty, at)
            model.zero_grad()
    return fired


def test_a_shortage_in_one_of_two_modules_with_sparse_gradients(ranks_over_each):
    assert ranks_over_each(several_job, size=SIZE, watchdog_s=WATCHDOG_S) == [9] * SIZE
