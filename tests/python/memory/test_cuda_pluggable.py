"""An allocator of the program's own in place of torch's (CUDAPluggableAllocator): it keeps no statistics."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
LIBRARY = Path(os.environ.get("LD_PRELOAD", "").split(":")[0]).parent / "libsim_pluggable.so"

BEGIN = f"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
torch.cuda.memory.change_current_allocator(
    torch.cuda.memory.CUDAPluggableAllocator({str(LIBRARY)!r}, "pluggable_allocate", "pluggable_free")
)
import brimful
from brimful import memory
MIB = 1 << 20

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()).cuda()

def loss_fn(model, x):
    return F.mse_loss(model(x), x)
"""


def said_by(program):
    if not LIBRARY.exists():
        pytest.skip("the allocator is one of the simulated device's tests")
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_batch_that_does_not_fit_is_run_in_pieces():
    pieces, difference, again = said_by("""
model, whole, x = net(), net(), torch.randn(1 << 14, 256, device="cuda")
loss_fn(whole, x).backward()
sizer = brimful.BatchSizer(model, torch.optim.SGD(model.parameters(), 0.1))
sizer.step(x[:64], loss_fn)
model.zero_grad()
held = torch.empty(torch.cuda.mem_get_info()[0] - 48 * MIB, dtype=torch.uint8, device="cuda")
outcome = sizer.step(x, loss_fn)
print(outcome.pieces)
print(max((a.grad - b.grad).abs().max().item() for a, b in zip(model.parameters(), whole.parameters())))
model.zero_grad()
print(sizer.step(x, loss_fn).retries)
""")
    assert int(pieces) > 1
    assert float(difference) < 1e-6
    assert int(again) == 0


def test_a_batch_that_no_split_makes_fit_is_reported_without_unknown_numbers():
    said = said_by("""
model, x = net(), torch.randn(256, 256, device="cuda")
sizer = brimful.BatchSizer(model, max_retries=2)
held = torch.empty(torch.cuda.mem_get_info()[0] - MIB, dtype=torch.uint8, device="cuda")
try:
    sizer.step(x, lambda model, x: model(x).repeat(64, 64).sum())
except brimful.BatchTooLarge as error:
    print(error)
""")
    assert any("(peak: unknown)" in line for line in said)
    assert "this allocator has no" in said[-1]


def test_a_wrapped_model_s_steps():
    (difference,) = said_by("""
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, whole, x = net(), net(), torch.randn(64, 256, device="cuda")
wrapped = brimful.DistributedDataParallel(model)
for _ in range(2):
    model.zero_grad()
    loss_fn(wrapped, x).backward()
brimful.BatchSizer(wrapped).step(x, loss_fn, accumulate=True)
loss_fn(whole, x).backward()
print(max((a.grad - 2 * b.grad).abs().max().item() for a, b in zip(model.parameters(), whole.parameters())))
dist.destroy_process_group()
""")
    assert float(difference) < 1e-6


def test_statistics_are_unknown_and_a_limit_is_refused():
    assert said_by("""
import pytest
stats = memory.stats("cuda")
print(stats)
print(stats.used_bytes, stats.peak_bytes, stats.limit_bytes, stats.reserved_bytes, stats.allocations, stats.ooms)
memory.reset_peak("cuda")
memory.release_cached("cuda")
memory.set_limit("cuda", None)
with pytest.raises(NotImplementedError, match="takes no limit .allocator: pluggable, bytes: 1024.; "):
    memory.set_limit("cuda", 1024)
print(memory.context_bytes("cuda"))
print([d["device"] for d in brimful.monitor.sample()["torch"]])
""") == [
        "Stats(unknown: the device's allocator keeps no statistics)",
        "None None None None None None",
        "None",
        "['cpu']",
    ]


def test_the_summary_has_all_but_the_bytes():
    said = said_by("""
model, x = net(), torch.randn(64, 256, device="cuda")
found = brimful.summary(model, x)
print(found.peak_bytes, found.used_bytes, found.modules[0].trainable)
print(found)
""")
    assert said[0] == f"0 0 {2 * (256 * 256 + 256)}"
    assert any("peaks unknown: the device's allocator keeps no statistics" in line for line in said)


def test_tracking_and_recording_leave_the_device_out():
    said = said_by("""
import pytest
model, x = net(), torch.randn(64, 256, device="cuda")
memory.start_recording()
loss_fn(model, x).backward()
memory.mark_step()
recording = memory.stop_recording()
print([str(d.device) for d in recording.devices])
with memory.track(modules=model):
    loss_fn(model, x).backward()
    memory.mark_step()
    print(memory.live_blocks("cuda"))
    with pytest.raises(RuntimeError, match="was never tracked .*torch's caching allocator"):
        memory.peak_by_category("cuda")
""")
    assert said == ["['cpu']", "[]"]
