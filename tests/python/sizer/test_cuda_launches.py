"""What a step asks of the device beside the program's own work, counted by the simulated one."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import brimful
from brimful import _C, memory

pytestmark = pytest.mark.gpu


@pytest.fixture
def calls():
    """calls(function, act): how often `act` calls a function of the runtime."""
    found = getattr(ctypes.CDLL(None), "sim_cuda_calls", None)
    if found is None:
        pytest.skip("only the simulated device counts")
    found.restype = ctypes.c_long

    def count(function, act):
        before = found(function.encode())
        act()
        return found(function.encode()) - before

    return count


def loss_fn(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("pieces, most", [(1, 20), (2, 40)])
@pytest.mark.parametrize("batch_norm", ["warn", "freeze"])
def test_buffers_are_kept_in_a_few_launches(calls, pieces, most, batch_norm):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(20)]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(16, 4, device="cuda")
    sizer = brimful.BatchSizer(model, pieces=pieces, batch_norm=batch_norm)
    sizer.step(x, loss_fn)
    model.zero_grad()
    assert calls("cudaMemcpyAsync", lambda: sizer.step(x, loss_fn)) < most


def test_gradients_of_zeros_are_looked_at_together(calls):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(40)]).cuda()
    x = torch.randn(16, 4, device="cuda")
    sizer = brimful.BatchSizer(model)
    sizer.step(x, loss_fn)
    model.zero_grad()
    without = calls("cudaMemcpyAsync", lambda: sizer.step(x, loss_fn))
    model.zero_grad(set_to_none=False)
    assert calls("cudaMemcpyAsync", lambda: sizer.step(x, loss_fn)) <= without + 2
    with pytest.raises(ValueError, match=r"a gradient is not empty .*\(shape: \[4, 4\]\)"):
        sizer.step(x, loss_fn)
    model.zero_grad(set_to_none=False)
    model[3].bias.grad[1] = float("nan")
    with pytest.raises(ValueError, match=r"a gradient is not empty .*\(shape: \[4\]\)"):
        sizer.step(x, loss_fn)
    assert model[0].weight.grad is not None  # what is refused is left as it was


def test_the_ring_asks_the_driver_for_few_products(calls):
    a = torch.randn(4, 4, device="cuda")

    def multiply():
        for _ in range(128):
            torch.mm(a, a)

    with brimful.op_ring():
        multiply()
        assert 0 < calls("cudaMemGetInfo", multiply) <= 4


def test_statistics_ask_the_driver_for_nothing(calls):
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        limit_bytes = memory.stats("cuda").limit_bytes
        assert limit_bytes == torch.cuda.mem_get_info()[1] // 2
        assert calls("cudaMemGetInfo", lambda: memory.stats("cuda")) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_step_asks_the_driver_for_its_room_and_no_more(calls, fraction):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda(), torch.randn(16, 4).cuda()
    sizer = brimful.BatchSizer(model, pieces=4)

    def step():
        model.zero_grad()
        sizer.step(x, loss_fn)

    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        step()
        assert calls("cudaMemGetInfo", step) <= 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def highest_resident_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def test_the_pool_is_read_without_the_history_of_its_blocks():
    """A history may have millions of lines, which torch's snapshot copies unless it is asked not to."""
    torch.cuda.memory._record_memory_history(context=None, max_entries=200_000)
    try:
        for _ in range(40_000):
            torch.empty(1, device="cuda")
        _C._cuda_pool("cuda")
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the highest is what is now
        before_kb = highest_resident_kb()
        _C._cuda_pool("cuda")
        assert highest_resident_kb() - before_kb < 4096
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
