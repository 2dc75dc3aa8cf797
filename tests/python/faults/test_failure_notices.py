"""A rank that fails or ends informs the others, once, where the program swallows its error too."""

import contextlib
import sys

import pytest
import torch.distributed as dist
from models import (
    classes,
    cross_entropy,
    dropout_net,
    gradients_of,
    same_bits,
    wrap,
)
from rank_processes import raised, run_script

import brimful
from brimful.reducer._whole_path import whole_path

SOON_S = 2.0


def swallowed_error_job(rank, told_by):
    model = wrap(dropout_net())
    errors = []

    def fail(_):
        raise ValueError("planted and swallowed")

    def one_step(batch, planted):
        with model.step():
            with contextlib.suppress(ValueError):
                cross_entropy(model, batch).backward()
            if planted and told_by == "forward":
                model(batch[0])
                dist.barrier()  # the others reach theirs when they have learnt of it

    for step in range(3):
        planted = rank.index == 1 and step == 1
        handle = model.module[3].weight.register_hook(fail) if planted else None
        errors.append(raised(one_step, classes(8, seed=step), planted))
        if handle:
            handle.remove()
        if step == 1 and not (planted and told_by == "forward"):
            dist.barrier()
        if step != 1:
            gradients = [None] * rank.size
            dist.all_gather_object(gradients, gradients_of(model))
            assert same_bits(*gradients)
        model.zero_grad()
    return errors


@pytest.mark.parametrize("told_by", ["forward", "end of the scope"])
def test_an_error_swallowed_inside_a_scope_is_raised_on_the_others(ranks, told_by):
    healthy, failed = ranks(swallowed_error_job, told_by, timeout_s=5)
    assert type(healthy[1]) is brimful.RankFailed and healthy[1].rank == 1, healthy
    assert healthy[1].seconds < SOON_S
    assert healthy[0] is failed[0] is healthy[2] is failed[2] is None, (healthy, failed)


BETWEEN_LOOPS = """
import sys
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import join_group
import brimful

rank, port = int(sys.argv[1]), int(sys.argv[2])
join_group(rank, 2, port, 5)
model = wrap(dropout_net())
sizer = brimful.BatchSizer(model)
for epoch in range(2):
    try:
        for batch in sizer.batches([classes(8, seed=step) for step in range(2)]):
            sizer.step(batch, cross_entropy)
            model.zero_grad()
    except brimful.RankFailed as error:
        print(f"epoch {epoch}, {type(error).__name__}: {error}")
        sys.exit(0)
    if rank == 1:
        raise OSError("planted between two loops")
"""


def test_a_rank_that_fails_between_two_loops_posts_its_failure_and_does_not_kill_the_others():
    (healthy, heard), (failed, printed) = run_script(BETWEEN_LOOPS)
    assert failed == 1 and "planted between two loops" in printed, printed
    assert healthy == 0 and "epoch 1, RankFailed" in heard, (healthy, heard)
    assert "rank 1 failed: OSError: planted between two loops" in heard, heard


def launches_at_the_end_job(rank, in_loop):
    with whole_path():
        model = wrap(dropout_net())
    sizer = brimful.BatchSizer(model)
    for batch in sizer.batches([classes(8, seed=step) for step in range(2)]):
        sizer.step(batch, cross_entropy)
        model.zero_grad()
        if in_loop:
            break
    before = model.reducer.counters.launches
    error = OSError("planted")
    sys.excepthook(type(error), error, None)
    return (model.reducer.counters.launches - before) / model.reducer.buckets


@pytest.mark.parametrize("in_loop", [True, False])
def test_a_rank_that_ends_launches_its_buckets_only_if_the_others_expect_them(ranks, in_loop):
    assert ranks(launches_at_the_end_job, in_loop, size=1) == [in_loop]


TOLD_ONCE = """
import sys
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import join_group
import brimful

rank, port = int(sys.argv[1]), int(sys.argv[2])
join_group(rank, 2, port, 5)
model = wrap(dropout_net())
sizer = brimful.BatchSizer(model)


def loss(model, piece):
    if rank == 1:
        raise ValueError("planted in the loss")
    return cross_entropy(model, piece)


for step in range(2):
    try:
        sizer.step(classes(8, seed=step), loss)
    except brimful.RankFailed as error:
        print(f"step {step}, {type(error).__name__}, {error}")
    model.zero_grad()
"""


def test_an_error_that_a_step_has_reported_is_not_reported_again_at_the_end_of_the_process():
    (healthy, heard), (failed, printed) = run_script(TOLD_ONCE)
    assert failed == 1 and "planted in the loss" in printed, printed
    assert healthy == 0, (healthy, heard)
    steps = heard.split("step 1, ")
    assert len(steps) == 2 and "step 0, RankFailed" in steps[0], heard
    assert "planted in the loss" in steps[0], heard
    assert steps[1].startswith("RankFailed") and "planted in the loss" not in steps[1], heard
