import pytest
import torch
from rank_processes import run_ranks


@pytest.fixture
def ranks():
    """ranks(function, *args, size=2): calls function(rank, *args) on every rank; the results by rank."""
    return run_ranks


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device (torch.cuda.is_available() is false)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
