"""The main paths on a GPU: what the other tests prove on the CPU, once more where memory and time are the device's."""

import copy
import ctypes
import gc
import sys
from subprocess import run

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from torch import nn

import brimful
from brimful import memory

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB = 1 << 20


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.ReLU()] * 4
    return nn.Sequential(*copy.deepcopy(layers)).to("cuda", torch.float64)


def data(rows):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 256, generator=generator, dtype=torch.float64).cuda()


def loss_fn(model, x):
    return F.mse_loss(model(x), x)


@pytest.fixture
def limit():
    """limit(bytes): that much more than the device's reserved bytes; none after the test."""
    memory.release_cached("cuda")
    yield lambda more: memory.set_limit("cuda", memory.stats("cuda").reserved_bytes + more)
    memory.set_limit("cuda", None)


def test_a_batch_that_does_not_fit_is_run_in_pieces_with_its_gradient(limit):
    whole, model, x = net(), net(), data(1 << 14)
    loss_fn(whole, x).backward()
    sizer = brimful.BatchSizer(model)
    sizer.step(x[:64], loss_fn)  # what libraries take once
    model.zero_grad()
    memory.release_cached("cuda")
    limit(96 * MIB)  # whole it takes 32 MiB a layer
    outcome = sizer.step(x, loss_fn)
    assert outcome.pieces > 1
    assert relative_difference(gradients_of(model), gradients_of(whole)) < 1e-10
    refused = memory.stats("cuda").ooms
    model.zero_grad()
    assert sizer.step(x, loss_fn).retries == 0
    assert memory.stats("cuda").ooms == refused


def test_nothing_of_a_backward_that_failed_is_in_use_when_it_is_repeated(limit):
    """The engine's thread of the device hands its error on before it lets go of the node that failed."""
    model, x = net(), data(1 << 10)
    sizer = brimful.BatchSizer(model)
    entries = []

    def take(gradient):
        torch.empty(len(gradient), MIB // 4, dtype=torch.uint8, device="cuda")

    def hungry(model, piece):
        if piece.data_ptr() == x.data_ptr():  # a try begins
            entries.append(torch.cuda.memory_allocated())
        out = model(piece)
        out.register_hook(take)
        return out.square().mean()

    sizer.step(x[:8], hungry)  # what libraries take once
    model.zero_grad()
    limit(128 * MIB)  # whole it takes 256
    for _ in range(8):
        entries.clear()
        assert brimful.BatchSizer(model).step(x, hungry).retries == len(entries) - 1 > 0
        model.zero_grad()
        assert set(entries) == {entries[0]}


def reduce_on_one_device(rank):
    model, x = net(), data(64)
    whole = copy.deepcopy(model)
    loss_fn(whole, x).backward()
    wrapped = brimful.DistributedDataParallel(model)
    rows = x.chunk(2)[rank.index]
    for _ in range(3):
        model.zero_grad()
        loss_fn(wrapped, rows).backward()
    return relative_difference(gradients_of(model), gradients_of(whole))


def test_two_ranks_reduce_gradients_of_one_device_over_gloo(ranks):
    assert max(ranks(reduce_on_one_device)) < 1e-10


def retry_on_one_rank(rank):
    model, x = net(), data(1 << 14)
    sizer = brimful.BatchSizer(brimful.DistributedDataParallel(model))
    sizer.step(x[:64], loss_fn)
    model.zero_grad()
    memory.release_cached("cuda")
    if rank.index == 1:
        memory.set_limit("cuda", memory.stats("cuda").reserved_bytes + 96 * MIB)
    outcome = sizer.step(x, loss_fn)
    whole = net()
    memory.set_limit("cuda", None)
    loss_fn(whole, x).backward()
    return outcome.pieces, relative_difference(gradients_of(model), gradients_of(whole))


def test_a_rank_that_runs_out_of_a_gpu_s_memory_retries_and_the_other_waits(ranks):
    (alone, first), (split, second) = ranks(retry_on_one_rank)
    assert alone == 1 < split
    assert max(first, second) < 1e-10


def test_the_summary_has_the_device_s_peak():
    model, x = net(), data(4096)
    found = brimful.summary(model, x)
    model.zero_grad()
    memory.release_cached("cuda")
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    assert found.peak_bytes == torch.cuda.max_memory_allocated()


ASSERTS = """
import torch, brimful
from torch import nn
table = nn.Embedding(100, 8).cuda()
try:
    with brimful.op_ring():
        for _ in range(20):
            table(torch.randint(100, (16,), device="cuda")).sum()
        table(torch.tensor([3, 512], device="cuda")).sum().backward()
        torch.cuda.synchronize()
except Exception as error:
    print(brimful.explain(error))
"""


def test_an_assertion_of_the_device_is_explained_by_the_ring(tmp_path):
    program = tmp_path / "asserts.py"
    program.write_text(ASSERTS)
    told = run(
        [sys.executable, program], capture_output=True, text=True, timeout=100, check=False
    ).stdout
    assert "asserts.py:9" in told
    assert "index 512" in told


# Where the host is far ahead: an operator of a stream that has not begun, and hundreds that come after it.
AHEAD = """
import ctypes, sys, torch, brimful
from torch import nn
sim = ctypes.CDLL("libcudart.so.13")
table, side = nn.Embedding(100, 8).cuda(), torch.cuda.Stream()
good, bad = torch.tensor([1, 2], device="cuda"), torch.tensor([3, 512], device="cuda")
torch.cuda.synchronize()
sim.sim_cuda_hold(ctypes.c_void_p(side.cuda_stream))
ring = brimful.op_ring()
try:
    with ring:
        with torch.cuda.stream(side):
            table(bad)
        with torch.cuda.stream(side if sys.argv[1] == "behind" else torch.cuda.current_stream()):
            for _ in range(int(sys.argv[2])):
                table(good)
        torch.cuda.synchronize()
except Exception as error:
    print(brimful.explain(error), len(ring.records()))
    print("dropped", sum(record.indices_dropped for record in ring.records()))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "sim_cuda_hold"), reason="holds its stream")
@pytest.mark.parametrize("where", ["behind", "beside"])
def test_the_ring_names_the_operator_that_a_device_far_behind_fails_in(tmp_path, where):
    program = tmp_path / "ahead.py"
    program.write_text(AHEAD)

    def told(count):
        command = [sys.executable, program, where, str(count)]
        return run(command, capture_output=True, text=True, timeout=100, check=False).stdout

    for count in (400, 700) if where == "behind" else (700,):
        words = told(count)
        assert "ahead.py:13 in <module>: aten::embedding got index 512" in words, words
        assert words.count("got index") == 2, words  # as evidence and as cause: no other is blamed
        dropped = int(words.split()[-1])
        assert (dropped > 0) == (where == "behind" and count == 700), words  # two copies a lookup


def test_the_monitor_sees_this_process_on_the_device():
    held = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    gpus = brimful.monitor.sample()["gpus"]
    assert any(gpu["used_bytes"] is None or gpu["used_bytes"] >= len(held) for gpu in gpus)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 16)).to("cuda")


def test_without_a_limit_the_sizes_that_fit_are_learned():
    """Beside what fills the device: the driver's free bytes and torch's own cache are the room."""
    gc.collect()  # what other tests left in cycles would be room in the middle of this one
    model = wide()
    sizer = brimful.BatchSizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2048, 16, device="cuda")
    memory.release_cached("cuda")
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - 40 * MIB, dtype=torch.uint8, device="cuda")
    retries = []
    for _ in range(100):
        retries.append(sizer.step(x, loss_fn).retries)
        model.zero_grad()
    del hog
    assert sum(retries[:5]) >= 1
    assert sum(retries[5:]) == 0, retries
    memory.release_cached("cuda")
    for _ in range(3):
        outcome = sizer.step(x, loss_fn)
        model.zero_grad()
    assert outcome.pieces == 1, "there is room again"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_evidence_of_a_shortage_is_looked_for_on_the_steps_device():
    model = net().to("cuda:1")
    pieces = []

    def cudnn_finds_no_memory(model, x):
        pieces.append(len(x))
        if len(x) == 64:
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 40, dtype=torch.uint8, device="cuda:1")
            raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
        return loss_fn(model, x)

    assert torch.cuda.current_device() == 0
    outcome = brimful.BatchSizer(model).step(data(64).to("cuda:1"), cudnn_finds_no_memory)
    assert outcome.pieces == 2
    assert pieces[-2:] == [32, 32]
