import gc
from functools import partial

import gpu_marks
import pytest
import torch
import torch._dynamo  # the first step of an optimizer would, after the heap was put aside
from frozen_heap import (
    put_aside,
    pytest_collection_finish as pytest_collection_finish,
    pytest_unconfigure as pytest_unconfigure,
)
from rank_processes import run_ranks
from record_transports import TRANSPORTS, over

import brimful


@pytest.fixture
def ranks():
    """ranks(function, *args, size=2): calls function(rank, *args) on every rank; the results by rank."""
    return run_ranks


@pytest.fixture(params=TRANSPORTS)
def ranks_over(request):
    """As `ranks`, with control records in the last bucket, and between hosts."""
    return partial(run_ranks, over, request.param)


@pytest.fixture(params=[TRANSPORTS[0], pytest.param(TRANSPORTS[1], marks=pytest.mark.slow)])
def ranks_over_each(request):
    """The same; between hosts only where slow tests run."""
    return partial(run_ranks, over, request.param)


@pytest.fixture
def no_limit():
    """The CPU has no memory limit before and after the test."""
    brimful.memory.set_limit("cpu", None)
    yield
    brimful.memory.set_limit("cpu", None)


@pytest.fixture
def one_thread():
    """Several threads would be slower: the work is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler():
    """Of one code, all nn.Sequentials', torch.compile takes only so many; what other tests have compiled counts."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def whole_heap():
    """A search for who holds a tensor takes longer where a part of the heap is put aside."""
    gc.unfreeze()
    yield
    put_aside()


def pytest_runtest_setup():
    """A step that runs out of memory collects garbage first: what other tests have left would count."""
    held = brimful.memory.stats("cpu").used_bytes
    if torch.cuda.is_initialized():
        held += torch.cuda.memory_allocated()
    if held > 1 << 20:
        gc.collect()


def pytest_collection_modifyitems(items):
    gpu_marks.mark(items)
    # What compiles for minutes does not come last.
    items.sort(key=lambda item: item.path.name != "test_examples.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A `gpu` test that skips on the simulated device runs nowhere: it has to be marked `real_gpu`."""
    report = yield
    wanted = item.get_closest_marker("gpu") and not item.get_closest_marker("real_gpu")
    if gpu_marks.SIMULATED and wanted and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skips on the simulated CUDA device: {report.longrepr}"
    return report
