"""The tests of the simulated device itself. They run on it: make test-cuda-sim."""

import ctypes
from pathlib import Path

import pytest
import torch
from ranks import preload
from simulation import set_delay, sim

HERE = Path(__file__).parent


def pytest_configure():
    if sim is None or not torch.cuda.is_available():
        raise pytest.UsageError("these tests run on the simulated device: python run.py -- ...")


def pytest_collection_modifyitems(items):
    """All of this folder: it gets those of others too."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish(session):
    if all(
        item.path.is_relative_to(HERE) for item in session.items
    ):  # others say what theirs import
        preload()


@pytest.fixture(autouse=True)
def clean():
    """Each test begins with an empty cache and leaves no fault and no delay."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    set_delay(None)
    for device in range(torch.cuda.device_count()):
        sim.sim_cuda_plant_error(device, 0)
        sim.sim_cuda_set_others(device, ctypes.c_size_t(0))
        torch.cuda.synchronize(device)
