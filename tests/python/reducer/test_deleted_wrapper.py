"""A wrapper is deleted by a thread that holds the GIL, while a thread of its own waits for the GIL to log a line."""

import gc
import logging
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from record_transports import Lines
from torch import nn

import brimful

pytestmark = pytest.mark.gpu


def deleted_by_the_gils_holder(rank):
    lines = Lines()
    logging.getLogger("brimful").addHandler(lines)
    torch.cuda.set_device(rank.index)
    group = dist.new_group(backend="nccl")
    model = brimful.DistributedDataParallel(nn.Linear(4, 4).cuda(), process_group=group)
    model(torch.ones(2, 4).cuda()).sum().backward()
    dist.barrier()
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    until = time.monotonic() + 3  # in which the other one's connections end
    while time.monotonic() < until:
        pass
    before = list(lines.lines)
    del model
    gc.collect()
    sys.setswitchinterval(switch_s)
    return before, lines.lines


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_thread_that_logs_while_its_wrapper_is_deleted(ranks):
    (before, after), _ = ranks(deleted_by_the_gils_holder, lost=(1,))
    assert not any("is aborted" in line for line in before)
    assert any("is aborted" in line for line in after)
