"""Faults of what the ladder leans on: a disk that is full, a process that is killed, a host without pinned memory."""

import contextlib
import ctypes
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from rank_processes import raised
from test_ladder import Encoder, assert_same, clear, room, square, state_of, unlimited
from torch import nn

import brimful
from brimful import _C

pytestmark = pytest.mark.usefixtures("no_limit")
EVERYTHING = _C.StepRungs(everything=True)
OFFLOADED = _C.StepRungs(offloaded=["blocks.0", "blocks.2", "head"])
MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


@contextlib.contextmanager
def disk_of(bytes):
    """No file may be larger: the disk is full for what lies behind (EFBIG in the place of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("rungs", [EVERYTHING, OFFLOADED], ids=["everything", "some"])
@pytest.mark.parametrize("bytes", [0, 40_000, 150_000])
def test_a_disk_that_is_full_in_the_middle_of_a_step_fails_it_and_changes_nothing(bytes, rungs):
    batch = torch.randn(2, 64, 32)
    expected = unlimited(Encoder, batch)[2]
    torch.manual_seed(0)
    model = Encoder()
    sizer = brimful.BatchSizer(model, batch_norm="freeze", ladder="auto")
    torch.manual_seed(1)
    before = state_of(model)
    used = []
    for _ in range(3):
        with disk_of(bytes), pytest.raises(OSError, match="a tensor could not be put") as error:
            sizer.step(batch, square, split=[1, 1], rungs=rungs)
        assert error.value.errno == errno.EFBIG
        assert 'leave "offload" out of ladder' in str(error.value)
        assert_same(state_of(model), before)
        assert "forward" not in vars(model.blocks[0])
        del error
        gc.collect()
        used.append(brimful.memory.stats("cpu").used_bytes)
    assert used[1] == used[2]
    for _ in range(3):
        clear(model)
        sizer.step(batch, square, split=[1, 1], rungs=rungs)
    assert_same(state_of(model), expected)


def test_what_a_failed_attempt_put_aside_may_outlive_the_next_one():
    batch = torch.randn(2, 64, 32)
    model = Encoder()
    sizer = brimful.BatchSizer(model, ladder="auto")
    errors = []
    for _ in range(3):  # with their frames, and the tensors in these
        with disk_of(150_000):
            try:
                sizer.step(batch, square, split=[1, 1], rungs=EVERYTHING)
            except OSError as error:
                errors.append(error)
    with _C._TraceScope() as scope:
        torch.ones(1000)
    assert list(scope.trace) == [4000, -4000]
    with _C._TraceScope() as scope:
        errors.clear()
        gc.collect()
        torch.ones(1000)
    assert list(scope.trace)[-2:] == [4000, -4000]
    torch.ones(1000)
    assert sizer.step(batch, square, split=[1, 1], rungs=EVERYTHING).rungs.everything


def test_the_first_attempt_on_the_ladder_may_find_the_disk_full():
    batch = torch.randn(2, 64, 32)
    peak, expected = unlimited(Encoder, batch)[1:]
    torch.manual_seed(0)
    model = Encoder()
    sizer = brimful.BatchSizer(model, batch_norm="freeze", pieces=2, ladder="auto")
    torch.manual_seed(1)
    before = state_of(model)
    with room(int(0.6 * peak)):
        with disk_of(100_000):
            assert type(raised(sizer.step, batch, square)) is OSError
        assert_same(state_of(model), before)
        for _ in range(3):
            clear(model)
            outcome = sizer.step(batch, square)
            assert outcome.rungs
    assert_same(state_of(model), expected)


def ranks_with_one_disk(rank):
    torch.manual_seed(0)
    model = brimful.DistributedDataParallel(Encoder())
    batch = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(rank.index))
    sizer = brimful.BatchSizer(model, ladder="auto")
    torch.manual_seed(5)
    before = state_of(model)
    disk = disk_of(100_000) if rank.index == 1 else contextlib.nullcontext()
    with disk:
        error = raised(sizer.step, batch, square, split=[1, 1], rungs=EVERYTHING)
    assert_same(state_of(model), before)
    sizer.step(batch, square, split=[1, 1], rungs=EVERYTHING)
    return type(error).__name__, str(error), [p.grad for p in model.parameters()]


def test_a_full_disk_of_one_rank_fails_the_step_on_all(ranks):
    (name, text, grads), (own, own_text, others) = ranks(ranks_with_one_disk)
    assert name == "RankFailed" and "a tensor could not be put aside" in text
    assert own == "OSError" and "File too large" in own_text
    assert all(map(torch.equal, grads, others))


KILLED = """
import sys, torch, brimful
from brimful import _C

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.Adam(model.parameters())
batch = torch.randn(1, 256)
filler = torch.empty(8 << 20, dtype=torch.uint8)  # so that the limit is above what all of it takes
sizer = brimful.BatchSizer(model, optimizer, ladder=["split", "recompute", "offload", "state"])

def loss_fn(model, x):
    loss = model(x.expand(512, 256)).square().mean()
    loss.register_hook(wait)
    return loss

def wait(gradient):
    if waits:
        print("in backward", flush=True)
        sys.stdin.read()

waits = False
brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes + (2 << 20))
sizer.step(batch, lambda model, x: model(x).square().mean())
optimizer.step()
optimizer.zero_grad()
brimful.memory.set_limit("cpu", None)
waits = True
sizer.step(batch, loss_fn, split=[1], rungs=_C.StepRungs(everything=True))
"""


def files_in(folder, pid):
    """Bytes of its files that the process has open, or mapped."""
    found = {}
    for kind in ("fd", "map_files"):
        for entry in os.scandir(f"/proc/{pid}/{kind}"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(str(folder)):
                    stat = os.stat(entry.path)
                    found[stat.st_ino] = stat.st_blocks * 512
    return found


def test_a_process_that_is_killed_in_a_step_leaves_no_file(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED)],
        env={**os.environ, "BRIMFUL_SCRATCH_DIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "in backward\n"
        held = files_in(tmp_path, child.pid)
        assert len(held) > 1  # of the optimizer's state, and of what the step put aside
        assert sum(held.values()) > 3 << 20
        assert os.listdir(tmp_path) == []
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


@pytest.fixture
def refuse_pinned():
    """Pinned memory is refused from the `after`th request on."""
    plant = getattr(ctypes.CDLL(None), "sim_cuda_plant_fault", None)
    if plant is None:
        pytest.skip("plants its fault in the simulated device")

    def refuse(after):
        torch._C._host_emptyCache()  # so that it is asked for
        small = nn.Linear(8, 8).cuda()  # what every step takes of it is cached again
        recomputed = _C.StepRungs(recomputed=[""])
        brimful.BatchSizer(small).step(torch.randn(1, 8, device="cuda"), square, rungs=recomputed)
        for name in (b"cudaHostAlloc", b"cudaHostRegister"):
            plant(name, MEMORY_ALLOCATION, ctypes.c_long(after), ctypes.c_long(1 << 30))

    yield refuse
    for name in (b"cudaHostAlloc", b"cudaHostRegister"):
        plant(name, 0, ctypes.c_long(0), ctypes.c_long(0))


def encoder_on_device():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(6)]
    return nn.Sequential(*layers).cuda()


def step_on_device(sizer, model, row):
    clear(model)
    torch.manual_seed(1)
    return sizer.step(row, square, split=[1])


@contextlib.contextmanager
def room_on_device(bytes):
    gc.collect()
    torch.cuda.empty_cache()
    brimful.memory.set_limit("cuda:0", torch.cuda.memory_allocated() + bytes)
    try:
        yield
    finally:
        brimful.memory.set_limit("cuda:0", None)


@pytest.fixture
def large_row():
    """A row on the device, the peak of its step, and what the step leaves."""
    row = torch.randn(1, 512, 128, device="cuda")
    model = encoder_on_device()
    sizer = brimful.BatchSizer(model)
    for _ in range(2):
        used = torch.cuda.memory_allocated()
        outcome = step_on_device(sizer, model, row)
    return row, outcome.peak_bytes - used, state_of(model)


def warnings_in(caplog):
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    return [line for line in lines if "pinned memory" in line]


@pytest.mark.gpu
@pytest.mark.parametrize("after", [0, 3])
def test_without_pinned_memory_rows_are_recomputed_after_one_warning(
    large_row, refuse_pinned, caplog, after
):
    row, peak, expected = large_row
    model = encoder_on_device()
    sizer = brimful.BatchSizer(model)
    with room_on_device(int(0.7 * peak)):
        refuse_pinned(after)
        for step in range(3):
            outcome = step_on_device(sizer, model, row)
            assert len(outcome.rungs.recomputed) == 6 and not outcome.rungs.offloaded
            assert_same(state_of(model), expected)
            assert outcome.retries <= 3 if step == 0 else outcome.retries == 1
    (line,) = warnings_in(caplog)
    assert "nothing is offloaded from here on, the host has no pinned memory for it (" in line
    assert "the step is repeated with 6 modules recomputed" in line


@pytest.mark.gpu
def test_pinned_memory_that_is_refused_later_changes_the_plan(large_row, refuse_pinned, caplog):
    row, peak, expected = large_row
    model = encoder_on_device()
    sizer = brimful.BatchSizer(model)
    with room_on_device(int(0.7 * peak)):
        assert step_on_device(sizer, model, row).rungs.everything
        refuse_pinned(0)
        offloaded = _C.StepRungs(offloaded=["0", "1", "2", "3", "4", "5"])
        clear(model)
        torch.manual_seed(1)
        outcome = sizer.step(row, square, split=[1], rungs=offloaded)
        assert outcome.retries == 1
        assert outcome.rungs.recomputed and not outcome.rungs.offloaded
        assert_same(state_of(model), expected)
        again = step_on_device(sizer, model, row)
        assert again.retries == 0 and again.rungs == outcome.rungs
    assert len(warnings_in(caplog)) == 1


@pytest.mark.gpu
def test_a_row_for_which_nothing_is_left_is_too_large_as_ever(large_row, refuse_pinned):
    row, peak, _ = large_row
    model = encoder_on_device()
    sizer = brimful.BatchSizer(model, ladder=["split", "offload"])
    clear(model)
    torch.manual_seed(1)
    before = state_of(model)
    with room_on_device(int(0.7 * peak)):
        refuse_pinned(0)
        for _ in range(2):
            torch.manual_seed(1)
            error = raised(sizer.step, row, square)
            assert type(error) is brimful.BatchTooLarge
            assert_same(state_of(model), before)


@pytest.mark.gpu
def test_without_pinned_memory_the_state_stays_after_one_warning(refuse_pinned, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer, ladder=["split", "state"])
    batch = torch.randn(4, 512, device="cuda")
    bytes = sum(p.nbytes for p in model.parameters())
    sizer.step(batch, square)  # cuBLAS's workspace
    clear(model)
    with room_on_device(int(1.5 * bytes) + (36 << 20)):
        refuse_pinned(0)
        for _ in range(2):
            sizer.step(batch, square)
            clear(model)
    assert not optimizer.state
    lines = [r.getMessage() for r in caplog.records if "the optimizer's state stays" in r.message]
    assert len(lines) == 1 and "where it is: CUDA error: out of memory" in lines[0]
