"""A rank that dies (SIGKILL), stops or sleeps past the group's timeout: the others raise, and name it."""

import datetime
import itertools
import os
import signal
import time
from functools import partial

import pytest
import torch.distributed as dist
from lost_ranks import at_once, require_named, train
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import raised

import brimful

TIMEOUT_S = 3  # of the process group
SOON_S = TIMEOUT_S + 4  # what the others say is waited for, and the machine may be busy
SIZE = 3


class Leave:
    """Where one rank is lost: in forward, late in backward (buckets were launched), or between two steps."""

    def __init__(self, model, point, nap_s):
        self.model, self.point, self.nap_s = model, point, nap_s
        self.armed, self.buckets_launched = False, None
        if point == "forward":
            model.module[3].register_forward_pre_hook(self)
        elif point == "backward":
            model.module[0].weight.register_hook(self)

    def __call__(self, *_):
        if not self.armed:
            return
        self.armed = False
        self.buckets_launched = self.model.buckets_launched
        assert (self.buckets_launched > 0) == (self.point == "backward")
        if self.nap_s is None:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.nap_s)


def lost_job(rank, point, nap_s, with_sizer, lost):
    model = wrap(dropout_net())
    sizer = brimful.BatchSizer(model) if with_sizer else None
    leave = Leave(model, point, nap_s)
    for step in range(4):
        leave.armed = rank.index == lost and step == 2
        if point == "between":
            leave()
        batch = classes(8, seed=step)
        error = raised(train, model, sizer, batch)
        if error is not None:
            return step, error
        model.zero_grad()
    return None


POINTS = ["forward", "between", "backward"]


@pytest.mark.parametrize("with_sizer", [True, False], ids=["sizer", "plain"])
def test_a_killed_rank_is_named_by_the_others(ranks_over_each, with_sizer):
    def run(point, lost):
        job = point, None, with_sizer, lost
        results = ranks_over_each(lost_job, *job, size=SIZE, timeout_s=TIMEOUT_S, lost=(lost,))
        assert results.pop(lost) is None
        for result in results:
            require_named(result, lost, "did not come (it left its loop, died or hangs)", SOON_S)

    places = itertools.product(POINTS, [0, SIZE - 1])
    at_once([partial(run, point, lost) for point, lost in places])


@pytest.mark.parametrize("with_sizer", [True, False], ids=["sizer", "plain"])
def test_a_rank_that_sleeps_past_the_timeout_is_named_by_the_others(ranks_over_each, with_sizer):
    def run(point, nap_s, words):
        results = ranks_over_each(
            lost_job, point, nap_s, with_sizer, 1, size=SIZE, timeout_s=TIMEOUT_S
        )
        for rank, result in enumerate(results):
            if rank != 1 or words == "began to wait ":
                require_named(result, 1, words, SOON_S)

    naps = (TIMEOUT_S + 0.7, "began to wait "), (TIMEOUT_S + 5, "did not come (it left")
    places = itertools.product(POINTS, naps)
    at_once([partial(run, point, *nap) for point, nap in places])


def join_group_of_rank_0s_store(rank):
    """Leaves the group, and joins one whose store rank 0 serves. Returns its process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank.index == 0 else None
    told = [store.port if store else None, os.getpid()]
    dist.broadcast_object_list(told, src=0)
    port, pid = told
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=store, rank=rank.index, world_size=rank.size, timeout=timeout
    )
    return pid


def stopped_server_job(rank):
    server = join_group_of_rank_0s_store(rank)
    model = wrap(dropout_net())
    for step in range(2):
        if step == 1 and rank.index == 0:
            os.kill(server, signal.SIGSTOP)
        error = raised(lambda step=step: cross_entropy(model, classes(8, seed=step)).backward())
        if error is not None:
            os.kill(server, signal.SIGKILL)
            return step, error
        model.zero_grad()
    return None


def test_a_stopped_rank_that_serves_the_store_keeps_nobody_waiting(ranks):
    _, (step, error) = ranks(stopped_server_job, size=2, timeout_s=TIMEOUT_S, lost=(0,))
    assert step == 1
    assert type(error) is brimful.RankFailed, error
    assert "the store is gone too (the rank that serves it died or hangs)" in str(error), error
    assert error.seconds < SOON_S, (error.seconds, error)
