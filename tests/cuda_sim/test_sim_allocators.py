"""Torch's other ways to memory: expandable segments, cudaMallocAsync, an allocator of the program's."""

from simulation import PLUGGABLE, program

USE = """
import torch
MIB = 1 << 20
total = torch.cuda.mem_get_info()[1]
kept = [torch.ones(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
used = total - torch.cuda.mem_get_info()[0]
print("used", used // MIB)
try:
    torch.empty(total, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
assert all(int(x.sum()) == 8 * MIB for x in kept)
del kept
torch.cuda.synchronize()
torch.cuda.empty_cache()
print("left", total - torch.cuda.mem_get_info()[0])
"""

SEGMENTS = """
large = {s["address"] for s in torch.cuda.memory_snapshot() if s["total_size"] > 2 * MIB}
print("segments", len(large))
"""


def said_with(config, source):
    status, said = program(source, PYTORCH_CUDA_ALLOC_CONF=config, PYTORCH_ALLOC_CONF=config)
    assert status == 0, said
    return [line for line in said.splitlines() if not line.startswith("[W")]  # torch's warnings


def test_expandable_segments_are_one_piece_that_grows():
    grown = USE.replace("del kept", SEGMENTS + "del kept")
    assert said_with("", grown) == ["used 60", "out of memory", "segments 3", "left 0"]
    expandable = said_with("expandable_segments:True", grown)
    assert expandable == ["used 60", "out of memory", "segments 1", "left 0"]


def test_memory_may_come_in_the_order_of_streams():
    assert said_with("backend:cudaMallocAsync", USE) == ["used 48", "out of memory", "left 0"]


ITS_OWN = (
    PLUGGABLE
    + """
MIB = 1 << 20
free = lambda: torch.cuda.mem_get_info()[0]
before = free()
kept = torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")
print("used", (before - free()) // MIB, requests() > 0, int(kept.sum()) == 8 * MIB)
try:
    torch.empty(2 * before, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print("out of memory", error)
try:
    torch.cuda.memory_allocated()
except RuntimeError:
    print("no statistics")
del kept
print("left", before - free())
"""
)


def test_a_program_may_bring_an_allocator():
    status, said = program(ITS_OWN)
    assert status == 0, said
    assert [line[:35] for line in said.splitlines() if not line.startswith("[W")] == [
        "used 8 True True",
        "out of memory this allocator has no",
        "no statistics",
        "left 0",
    ]
