"""Torch's caching allocator on the simulated device."""

import ctypes

import pytest
import torch
from simulation import MIB, calls, program, sim


def test_what_tensors_take_is_counted():
    before = torch.cuda.memory_allocated()
    x = torch.zeros(8 * MIB // 4, device="cuda")
    assert torch.cuda.memory_allocated() - before == 8 * MIB
    y = x + 1
    del y
    assert torch.cuda.max_memory_allocated() - before == 16 * MIB
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.memory_reserved() >= 16 * MIB
    assert "CUDA OOMs" in torch.cuda.memory_summary()


def test_the_cache_serves_what_was_freed():
    torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    asked = calls("cudaMalloc")
    for _ in range(3):
        torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    assert calls("cudaMalloc") == asked


def test_more_than_there_is_is_an_error_of_torch_s():
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")


def test_the_error_names_the_processes_on_the_device():
    """Torch asks NVML, which here is the simulated device's."""
    held = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    sim.sim_cuda_set_others(0, ctypes.c_size_t(100 * MIB))
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(total - 60 * MIB, dtype=torch.uint8, device="cuda")
    text = str(error.value)
    assert "Process 3999999 has 100.00 MiB memory in use" in text
    own = torch.cuda.memory_reserved()  # of other tests, too
    assert own >= held.numel()
    assert f"this process has {own / MIB:.2f} MiB memory in use" in text


def test_history_and_snapshot_have_the_lines_of_python():
    torch.cuda.memory._record_memory_history()
    try:
        z = torch.ones(MIB, device="cuda") * 2
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(torch.cuda.mem_get_info()[1], device="cuda")
        snapshot = torch.cuda.memory._snapshot()
        del z
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    trace = snapshot["device_traces"][0]
    assert {"alloc", "oom"} <= {entry["action"] for entry in trace}
    own = test_history_and_snapshot_have_the_lines_of_python.__name__
    assert any(frame["name"] == own for entry in trace for frame in entry.get("frames", []))


def test_the_fraction_of_a_process_is_a_limit():
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(total // 2, dtype=torch.uint8, device="cuda")


def test_a_product_has_a_workspace_while_it_is_made():
    """Of the size that torch chooses for the device: 32 MiB, as CUBLAS_WORKSPACE_CONFIG is not set."""
    a = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    product = a @ a
    assert torch.cuda.memory_allocated() - before == product.nbytes
    assert torch.cuda.max_memory_allocated() - before in (32 * MIB, 32 * MIB + product.nbytes)


def test_convolutions_take_a_made_up_workspace_that_jumps_once():
    source = """
import os, torch
layer = torch.nn.Conv2d(8, 8, 3, padding=1).cuda()
for rows in (4, 15, 16, 32):
    x = torch.randn(rows, 8, 64, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    print((torch.cuda.max_memory_allocated() - before - y.nbytes) / x.nbytes, end=" ")
    y.sum().backward()
    layer.zero_grad()
    del x, y
print(flush=True)
os._exit(0)  # an autograd thread may still end
"""
    _, without = program(source)
    assert without.split() == ["0.0"] * 4
    _, told = program(source, SIM_CUDA_CONV_WORKSPACE="16")
    assert told.split() == ["0.25", "0.25", "4.0", "4.0"]
