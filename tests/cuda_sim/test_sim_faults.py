"""Planted faults, and errors that stay."""

import pytest
import torch
from simulation import MIB, plant_fault, program, sim

MEMORY_ALLOCATION, ILLEGAL_ADDRESS = 2, 700


def test_a_planted_fault_fails_the_calls_it_names():
    plant_fault("cudaMalloc", MEMORY_ALLOCATION, times=2)  # torch tries once more
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")


def test_a_planted_fault_lets_calls_pass_first():
    torch.cuda.synchronize()
    plant_fault("cudaDeviceSynchronize", ILLEGAL_ADDRESS, after=2)
    torch.cuda.synchronize()
    torch.cuda.synchronize()
    with pytest.raises(torch.AcceleratorError, match="an illegal memory access was encountered"):
        torch.cuda.synchronize()
    torch.cuda.synchronize()


def test_an_error_of_a_device_stays_and_is_that_device_s():
    sim.sim_cuda_plant_error(0, ILLEGAL_ADDRESS)
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="an illegal memory access"):
            torch.ones(3, device="cuda").cpu()
    assert torch.ones(3, device="cuda:1").sum().item() == 3
    sim.sim_cuda_plant_error(0, 0)
    assert torch.ones(3, device="cuda").sum().item() == 3


OUT_OF_BOUNDS = """
import torch
table = torch.nn.Embedding(10, 4).cuda()
for index in (10, 3):
    try:
        table(torch.tensor([index], device="cuda"))
        torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        print(str(error).splitlines()[0])
"""


def test_an_index_out_of_bounds_is_an_assertion_of_the_device():
    status, said = program(OUT_OF_BOUNDS)
    assert status == 0, said
    assert said.count("CUDA error: device-side assert triggered") == 2
