"""What is left when a sizer is dropped, and when the interpreter ends."""

import gc
import weakref

import torch
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import run_script

import brimful

GLOO_THREADS = """
import atexit, pathlib, sys


def gloo_threads():
    names = [file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


# Before brimful's own hook is registered, so that it runs after it.
atexit.register(lambda: print("at the end", gloo_threads()))

import torch
import torch.distributed as dist
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import join_group
import brimful

rank, port = int(sys.argv[1]), int(sys.argv[2])
join_group(rank, 2, port, 15)
model = wrap(dropout_net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizer = brimful.BatchSizer(model, optimizer)
sizer.step(classes(8), cross_entropy)
dist.all_reduce(torch.ones(1))  # a gloo thread drops this tensor of Python some time later
dist.destroy_process_group()
print("before", len(gloo_threads()) > 0)
"""


def test_no_thread_of_a_process_group_outlives_the_interpreter():
    for status, printed in run_script(GLOO_THREADS):
        assert status == 0, printed
        assert "before True" in printed, printed
        assert "at the end []" in printed, printed


def dropped_job(rank):
    model = wrap(dropout_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    for batch in sizer.batches([classes(8, seed=rank.index)]):
        sizer.step(batch, cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    watched = [weakref.ref(thing) for thing in (model, sizer, model.module)]
    del model, sizer, optimizer, batch
    gc.collect()
    return [thing() is None for thing in watched]


def test_a_sizer_that_is_dropped_lets_go_of_its_model(ranks):
    assert ranks(dropped_job) == [[True] * 3] * 2
