"""A process that has not used CUDA yet may still choose its devices, and fork."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

BEGIN = """
import ctypes, os
import torch
import brimful
from brimful import errors, gpus, memory, monitor, search

def counted():
    return getattr(ctypes.CDLL(None), "sim_cuda_calls", lambda name: 0)(b"cudaGetDeviceCount")

"""

END = """
assert counted() == 0, counted()
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
pid = os.fork()
if pid == 0:
    torch.zeros(1, device="cuda:0")
    os._exit(0 if torch.cuda.device_count() == 1 else 1)
assert os.waitpid(pid, 0)[1] == 0, "CUDA works in a child"
torch.zeros(1, device="cuda:0")
assert torch.cuda.device_count() == 1, torch.cuda.device_count()
"""

STEP = """
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
sizer = brimful.BatchSizer(model, optimizer, predict=True)
for limit in (None, memory.stats("cpu").used_bytes + 30_000):
    memory.set_limit("cpu", limit)
    try:
        sizer.step(torch.ones(64, 8), lambda m, p: m(p).square().mean())
    except torch.OutOfMemoryError:
        pass
    optimizer.zero_grad()  # without optimizer.step(), in which torch counts devices
"""

BACKWARD_END = """
assert counted() <= 1, counted()  # by torch's engine, in the first backward
assert not torch.cuda.is_initialized()
"""

USES = {
    "gpus": "gpus.getGPUs(); gpus.getAvailable()",
    "sample": "monitor.sample(); brimful._C._sample_table(-1)",
    "prometheus": "monitor.prometheus_text()",
    "wait": "search.wait_for_memory(1, timeout_s=1)",
    "explain": "errors.explain(RuntimeError('CUDA error: out of memory'))",
    "map": "brimful.map_batches(torch.nn.Linear(8, 4), torch.ones(64, 8))",
    "pipeline": "brimful.Pipeline([torch.nn.Linear(8, 4)], microbatches=2).forward(torch.ones(4, 8))",
}
WITH_BACKWARD = {
    "step": STEP,
    "tracked step": "memory.track()\n" + STEP,
    "summary": "brimful.summary(torch.nn.Linear(8, 4), torch.ones(64, 8))",
}


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", USES)
def test_devices_are_not_counted_before_cuda_is_in_use(use):
    run(USES[use] + END)


@pytest.mark.parametrize("use", WITH_BACKWARD)
def test_a_backward_on_the_cpu_counts_devices_as_torchs_does(use):
    run(WITH_BACKWARD[use] + BACKWARD_END)
