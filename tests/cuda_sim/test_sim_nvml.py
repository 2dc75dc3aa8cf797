"""The made-up driver's NVML in a process with simulated devices."""

import ctypes
import os

import pytest
import torch
from simulation import MIB, sim


class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]


@pytest.fixture
def nvml():
    library = ctypes.CDLL("libnvidia-ml.so.1")
    assert library.nvmlInit_v2() == 0
    yield library
    library.nvmlShutdown()


def handle(nvml, index):
    device = ctypes.c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
    return device


def test_it_shows_the_machine_s_devices(nvml):
    count = ctypes.c_uint()
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert count.value == 2
    text = ctypes.create_string_buffer(96)
    assert nvml.nvmlDeviceGetUUID(handle(nvml, 1), text, 96) == 0
    assert text.value.decode() == f"GPU-{torch.cuda.get_device_properties(1).uuid}"


def test_it_lives_until_each_start_has_its_end(nvml):
    """Others of the process, torch for one, start it once and keep it."""
    count = ctypes.c_uint()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlShutdown() == 0
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0


def test_it_has_the_memory_of_this_process_and_of_another(nvml):
    held = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:1")
    sim.sim_cuda_set_others(1, ctypes.c_size_t(50 * MIB))
    device, memory = handle(nvml, 1), Memory()
    assert nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    own = torch.cuda.memory_reserved(1)
    assert own >= held.numel()
    assert memory.used == own + 50 * MIB
    assert (memory.free, memory.total) == torch.cuda.mem_get_info(1)
    count, infos = ctypes.c_uint(4), (Process * 4)()
    assert nvml.nvmlDeviceGetComputeRunningProcesses(device, ctypes.byref(count), infos) == 0
    found = {info.pid: info.used for info in infos[: count.value]}
    assert found == {os.getpid(): own, 3999999: 50 * MIB}
