"""Devices without arithmetic: memory is addresses alone, kernels do nothing, and torch's own host code decides."""

import os
from pathlib import Path

import pytest
from simulation import without_arithmetic

SUMS = """
import torch
for shape in ((48000, 256), (96000, 256), (96000, 128), (48000, 10), (16, 256)):
    x = torch.empty(shape, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = x.sum(0)
    print(torch.cuda.max_memory_allocated() - before - (y.nbytes + 511) // 512 * 512, end=" ")
"""


def test_a_sum_over_rows_takes_what_it_takes_on_an_h200():
    """What the device itself took: tools/gpu/recorded."""
    status, said = without_arithmetic(SUMS, "h200")
    assert status == 0, said
    assert said.split() == ["98566656", "138412544", "98566656", "15872", "0"]


# Linear layers, a convolution, batch normalization, an LSTM, attention in bf16, a loss and an optimizer.
STEP = """
import torch
from torch import nn
from torch.nn import functional as F

print(*torch.cuda.mem_get_info(), torch.cuda.get_device_name())
print(*torch.cuda.get_device_capability(), torch.cuda.get_device_properties(0).multi_processor_count)
resident = lambda: int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) >> 10
body = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(2)).cuda()
lstm, head = nn.LSTM(36, 16, 2, batch_first=True).cuda(), nn.Linear(16, 5).cuda()
parameters = [*body.parameters(), *lstm.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters)
for _ in range(2):
    y = lstm(body(torch.randn(4, 3, 8, 8, device="cuda")))[0]
    with torch.autocast("cuda", torch.bfloat16):
        q = y.unsqueeze(1)
        y = F.scaled_dot_product_attention(q, q, q).squeeze(1)
        loss = F.cross_entropy(head(y).flatten(0, 1), torch.zeros(32, dtype=torch.long, device="cuda"))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), all(state["exp_avg"].is_cuda for state in optimizer.state.values()))
before = resident()
x = torch.ones(60 << 30, dtype=torch.uint8, device="cuda")
y = x.clone()
print(y[-3:].tolist(), torch.cuda.memory_allocated() >= 120 << 30, resident() - before < 64)
"""


def test_a_training_step_and_120_gib_take_no_memory_of_the_host():
    status, said = without_arithmetic(STEP, "h200")
    assert status == 0, said
    lines = said.splitlines()
    assert lines[:2] == ["150109880320 150109880320 NVIDIA H200", "9 0 132"]
    assert lines[2:4] == ["0.0 True", "[0, 0, 0] True True"]


CONVOLUTIONS = """
import torch
layer = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False).cuda()
for rows in (64, 128, 192, 256, 4096):
    x = torch.empty(rows, 16, 16, 16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        y = layer(x)
    print(torch.cuda.max_memory_allocated() - before - y.nbytes, end=" ")
    del x, y
"""


def test_a_convolution_takes_the_recorded_workspace_and_one_on_the_line_between_rows():
    """128 rows took 4203536 bytes, 256 took 8397840, and 64 none: tools/gpu/recorded. Blocks are of 512 bytes."""
    status, said = without_arithmetic(CONVOLUTIONS, "h200")
    assert status == 0, said
    whole = [(bytes_ + 511) // 512 * 512 for bytes_ in (0, 4203536, 6300688, 8397840, 134226992)]
    assert [int(word) for word in said.split()] == whole


@pytest.mark.parametrize(
    ("word", "bytes_"),
    [
        # 64, 128 and 256 rows are recorded. 192 lie between the last two. Beyond 2048 it is none, or the bound.
        ("least", (0, 4203536, 4203536, 8397840, 0)),
        ("most", (0, 4203536, 8397840, 8397840, 10 * (2 * (4096 << 14) + 9216) + (8 << 20))),
    ],
)
def test_a_workspace_that_is_not_recorded_is_at_an_end_of_an_interval(word, bytes_):
    status, said = without_arithmetic(CONVOLUTIONS, "h200", SIM_CUDA_UNKNOWN=word)
    assert status == 0, said
    assert [int(word) for word in said.split()] == [(each + 511) // 512 * 512 for each in bytes_]


REFUSED = """
import torch
layer = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False).cuda()
x = torch.empty(2048, 16, 16, 16, device="cuda")  # 32 MiB, its result as much, and its workspace twice as much
with torch.no_grad():
    print(tuple(layer(x).shape))
"""


@pytest.mark.parametrize("memory_mb, refused", [(160, False), (96, True)])
def test_a_convolution_whose_workspace_is_refused_does_without(memory_mb, refused):
    status, said = without_arithmetic(REFUSED, "h200", SIM_CUDA_MEMORY_MB=str(memory_mb))
    assert status == 0, said
    assert said.startswith("(2048, 16, 16, 16)\n")
    assert ("there was no memory (operations: 1)" in said) == refused


PROPERTIES = """
import torch
p = torch.cuda.get_device_properties(0)
print(p.total_memory, p.multi_processor_count, p.major, p.minor)
"""


def test_a_device_of_one_s_own_is_what_it_is_said_to_be():
    status, said = without_arithmetic(PROPERTIES + SUMS, "24GiB,sms=82,cc=8.9")
    assert status == 0, said
    first, sums = said.splitlines()
    assert first == f"{24 << 30} 82 8 9"
    assert sums.split()[0] not in ("0", "98566656")  # of other multiprocessors


def count_devices():
    """Python source that asks the runtime for its devices, without torch."""
    libraries = Path(os.environ["LD_PRELOAD"].split(":")[0]).parent
    runtime = str(libraries / "libcudart.so.13")
    count = "cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))"
    return f"import ctypes; ctypes.CDLL({runtime!r}).{count}"


@pytest.mark.parametrize(
    "device",
    [
        *("h20", "24GiB,sms=82", "24GiB,sms=82,cc=8.9,l2=3", "24GB,sms=1,cc=8.0"),
        *("infGiB,sms=1,cc=8.0", "nanGiB,sms=1,cc=8.0", "-1GiB,sms=1,cc=8.0", "1GiB,sms=-1,cc=8.0"),
        *("1GiB,sms=1x,cc=8.0", "1GiB,sms=1,cc=8", "1GiB,,sms=1,cc=8.0", ","),
    ],
)
def test_a_word_that_names_no_device_ends_with_a_sentence(device):
    status, said = without_arithmetic(count_devices(), device)
    assert status == 2, said
    assert (
        f"SIM_CUDA_DEVICE names no device (SIM_CUDA_DEVICE: {device}): use one of t4, l4," in said
    )
    assert "24GiB,sms=82,cc=8.9" in said


def test_a_device_s_name_is_for_devices_without_arithmetic():
    status, said = without_arithmetic(count_devices(), "h200", SIM_CUDA_ARITHMETIC="1")
    assert status == 2, said
    assert "(SIM_CUDA_DEVICE: h200): set SIM_CUDA_ARITHMETIC=0" in said
