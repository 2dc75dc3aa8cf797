"""The CPU's budget from what the system allows: a program of its own under a real RLIMIT_AS."""

import json
import os
import subprocess
import sys

import pytest

from brimful import memory

MIB = 1 << 20
FREE = 384 * MIB  # address space that the program may still take when it starts its step
STACK = 48 * MIB  # of a thread that starts in the middle of the step: memory that is no tensor

# A piece's backward needs 22 results of 16 KiB a row: 352 MiB for half of the batch. They fit, and leave too little for
# the thread; a budget of FREE less 64 MiB refuses them.
PROGRAM = """
import copy, json, resource, sys, threading
import torch
import brimful

free, stack, auto = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "auto"
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4096)
batch = torch.randn(2048, 4)


def loss_fn(net, piece):
    hidden = net(piece)
    for _ in range(22):
        hidden = hidden.tanh()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    return hidden.mean()


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


sizer = brimful.BatchSizer(model)
sizer.step(batch[:4], loss_fn)  # what torch makes at its first use is there
model.zero_grad()
sizer = brimful.BatchSizer(model)
threading.stack_size(stack)
before = address_space()
used = brimful.memory.stats("cpu").used_bytes
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (before + free, unlimited[1]))
if auto:
    brimful.memory.set_limit("cpu", "auto")
found = brimful.memory.system_limit()
held = torch.ones(64 << 20, dtype=torch.uint8)
with_tensor = brimful.memory.system_limit()
del held
outcome = sizer.step(batch, loss_fn, split=[1024, 1024])
limit = brimful.memory.stats("cpu").limit_bytes
resource.setrlimit(resource.RLIMIT_AS, unlimited)
brimful.memory.set_limit("cpu", None)
by_hand = copy.deepcopy(model)
by_hand.zero_grad()
loss = 0.0
for piece in batch.split(outcome.split):
    piece_loss = loss_fn(by_hand, piece)
    piece_loss.backward(torch.tensor(len(piece) / len(batch)))
    loss += piece_loss.item() * len(piece) / len(batch)
print(json.dumps({
    "source": found.source, "where": found.where, "bound": found.bound_bytes - before - free,
    "of_tensor": with_tensor.limit_bytes - found.limit_bytes, "limit": limit, "used": used, "peak": outcome.peak_bytes,
    "pieces": outcome.pieces, "retries": outcome.retries,
    "loss": abs(outcome.loss - loss),
    "equal": all(torch.equal(a.grad, b.grad)
                 for a, b in zip(model.parameters(), by_hand.parameters(), strict=True)),
    "gradient": model.weight.grad.abs().sum().item(),
}))
"""


def run_limited(word):
    """PROGRAM's exit status, last line and errors. malloc maps every large block, so sizes are exact."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(FREE), str(STACK), word],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "131072",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def no_limit():
    yield
    memory.set_limit("cpu", None)


def test_under_a_real_address_space_limit_a_step_that_is_too_big_is_retried_and_exact():
    status, output, errors = run_limited("auto")
    assert status == 0, errors
    got = json.loads(output.splitlines()[-1])
    assert (got["source"], got["where"], got["bound"]) == ("RLIMIT_AS", "RLIMIT_AS", 0)
    # The limit leaves 64 MiB of what was free; setting it may have given some of malloc's pages back.
    assert got["used"] + FREE - 68 * MIB <= got["limit"] <= got["used"] + FREE - 60 * MIB
    assert abs(got["of_tensor"]) <= MIB  # a tensor takes from what is free, and is in the limit
    assert got["peak"] <= got["limit"]
    assert got["retries"] >= 1
    assert got["pieces"] > 2
    assert got["loss"] <= 1e-6
    assert got["equal"]
    assert got["gradient"] > 0


def test_without_a_budget_tensors_leave_nothing_to_the_rest_of_the_program():
    status, _, errors = run_limited("none")
    assert status == 1
    assert "RuntimeError: can't start new thread" in errors


def test_the_automatic_limit_is_what_system_limit_says(no_limit):
    found = memory.system_limit()
    memory.set_limit("cpu", "auto")
    limit = memory.stats("cpu").limit_bytes
    assert found.source in ("cgroup v2", "cgroup v1", "RLIMIT_AS", "MemAvailable")
    # The machine's other programs go on between the two.
    assert found.limit_bytes / 2 <= limit <= found.limit_bytes * 2
    assert 0 < found.margin_bytes <= found.free_bytes <= found.bound_bytes
    assert f"source={found.source}, where={found.where})" in repr(found)


@pytest.mark.parametrize("word", ["1 GiB", "AUTO", ""])
def test_another_text_is_no_limit(word):
    with pytest.raises(
        ValueError, match=rf"bytes is not a limit \(bytes: {word}\); pass a number of bytes, 'auto'"
    ):
        memory.set_limit("cpu", word)
    assert memory.stats("cpu").limit_bytes is None


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "meta"])
def test_only_the_cpu_has_an_automatic_limit(device):
    with pytest.raises(ValueError, match=rf"\(device: {device}\); pass a number of bytes or None"):
        memory.set_limit(device, "auto")
