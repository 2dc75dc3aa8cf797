import pytest
import torch
from rank_processes import run_ranks

import brimful


@pytest.fixture
def ranks():
    """ranks(function, *args, size=2): calls function(rank, *args) on every rank; the results by rank."""
    return run_ranks


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


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device (torch.cuda.is_available() is false)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
