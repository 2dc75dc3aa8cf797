"""Ranks over NCCL: one dies or hangs, and the others raise RankFailed before torch's watchdog acts."""

import datetime
import os
import re
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lost_ranks import CLEAN_UP_ONLY, CYCLES_A_S, KINDS, at_once, require_named, train
from models import classes, dropout_net, wrap
from rank_processes import raised

import brimful

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
TIMEOUT_S = 4  # of the process group
SOON_S = TIMEOUT_S + 3  # what the others say is waited for, and the machine may be busy


def lose(nap_s):
    if nap_s is None:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(nap_s)


class Leave:
    """Where rank 1 is lost in a step: in forward, in backward behind the first buckets, or as it waits at the end."""

    def __init__(self, model, point, nap_s):
        self.model, self.point, self.nap_s, self.armed = model, point, nap_s, False
        if point in ("forward", "both"):
            model.module[3].register_forward_pre_hook(self)
        if point != "forward":
            model.module[0].weight.register_hook(self)

    def __call__(self, *_):
        if not self.armed:
            return
        in_backward = self.model.buckets_launched > 0
        self.armed = self.point == "both" and not in_backward
        assert in_backward == (self.point != "forward") or self.point == "both"
        if self.point != "finish":
            return lose(self.nap_s)
        torch.cuda._sleep((2 if self.nap_s is None else self.nap_s) * CYCLES_A_S)
        if self.nap_s is None:
            threading.Timer(0.5, lose, [None]).start()


def lost_job(rank, kind, environment, point, nap_s, with_sizer):
    os.environ.update(environment, TORCH_DIST_USE_NCCL2=KINDS[kind])
    torch.cuda.set_device(rank.index)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    group = dist.new_group(backend="nccl", timeout=timeout)
    model = wrap(dropout_net().cuda(), process_group=group)
    second = wrap(dropout_net().cuda(), process_group=group) if point == "agreement" else None
    sizer = brimful.BatchSizer(model) if with_sizer else None
    leave = Leave(model if second is None else second, "forward" if second else point, nap_s)
    for step in range(4):
        leave.armed = rank.index == 1 and step == 2
        batch = [t.cuda() for t in classes(8, seed=step)]

        def run(batch=batch):
            train(model, sizer, batch)
            if second:
                train(second, None, batch)

        error = raised(run)
        if error is not None:
            torch.cuda.synchronize()  # nothing is left in a kernel
            return step, error
        for each in filter(None, (model, second)):
            each.zero_grad()
    return None


def slow_to_import(rank):
    return [name for name in ("brimful", "torch._dynamo") if name not in sys.modules]


def test_ranks_import_nothing_large_in_their_first_step(ranks):
    """It takes seconds, and the others wait no longer than the group's timeout."""
    assert ranks(slow_to_import) == [[], []]


DID_NOT_COME = "did not come (it left its loop, died or hangs)"


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_named_by_the_other(ranks, kind):
    def run(point, with_sizer):
        job = kind, CLEAN_UP_ONLY, point, None, with_sizer
        results = ranks(lost_job, *job, lost=(1,))
        # A step whose verdict all have given stands: the next one finds that its sums have failed.
        steps = (2, 3) if point == "finish" else (2,)
        require_named(results[0], 1, DID_NOT_COME, SOON_S, steps)

    places = [("forward", True), ("backward", False), ("agreement", False), ("finish", True)]
    at_once([partial(run, *place) for place in places])


def test_without_a_watchdog_a_killed_rank_is_named(ranks):
    def run(kind):
        environment = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
        results = ranks(lost_job, kind, environment, "backward", None, True, lost=(1,))
        require_named(results[0], 1, DID_NOT_COME, SOON_S)

    at_once([partial(run, kind) for kind in KINDS])


# As the watchdog is unless it is set otherwise: it would end the process at the timeout.
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_hangs_is_named_before_the_watchdog_ends_the_process(ranks, kind):
    def run(point, with_sizer):
        results = ranks(lost_job, kind, {}, point, TIMEOUT_S + 3, with_sizer, watchdog_s=40)
        require_named(results[0], 1, DID_NOT_COME, SOON_S)

    places = [("forward", False), ("backward", True), ("agreement", False)]
    at_once([partial(run, *place) for place in places])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_comes_too_late_is_not_ended_by_its_watchdog(ranks, kind):
    """It calls no collective that the others have left, which its watchdog would find as its backward goes on."""
    results = ranks(lost_job, kind, {}, "both", TIMEOUT_S, False, watchdog_s=40)
    require_named(results[0], 1, DID_NOT_COME, SOON_S)
    step, error = results[1]
    assert step == 2, results
    assert type(error) is brimful.RankFailed, error
    assert error.rank == 1, error
    assert "rank 1 began to wait at least " in str(error), error
    assert "(cause: the others have given up waiting for this rank)" in str(error), error


def test_a_device_that_hangs_ends_no_process(ranks):
    """The ranks wait for the same sum, and none knows whose device is late."""

    def run(kind):
        results = ranks(lost_job, kind, {}, "finish", TIMEOUT_S + 3, False, watchdog_s=40)
        for step, error in results:
            assert step in (2, 3), results  # a plain loop's step does not wait for its sums
            assert type(error) is brimful.RankFailed, error
            assert re.search("broke in step 2: |the sums of step 2 had not ended", str(error)), (
                error
            )

    at_once([partial(run, kind) for kind in KINDS])
