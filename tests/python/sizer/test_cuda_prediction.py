"""Pieces chosen by a forecast on CUDA: what torch's allocator will do with a step's requests, in its pool as it is."""

import copy
import ctypes
import gc
import sys
from pathlib import Path

import pytest
import torch
from models import gradients_of, relative_difference

import brimful
from brimful import memory

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.cuda.replay_steps import SETTINGS
from benchmarks.sizer import models

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB = 1 << 20
PLAIN = (
    "expandable_segments:False,roundup_power2_divisions:1,max_split_size_mb:1000000,"
    "max_non_split_rounding_mb:20"
)
# Rows, and the share of what one piece takes beyond six: of small batches, whose blocks are of the small pool, and
# of larger ones, where segments that a rehearsal left (ResNet) or segments of few sizes (encoder) are in the way.
BATCHES = {
    "MLP": ((187, 0.1), (6000, 0.3)),
    "ResNet": ((32, 0.1), (256, 0.7)),
    "U-Net": ((32, 0.1), (128, 0.3)),
    "encoder": ((32, 0.1), (128, 0.0)),
    "checkpointed": ((375, 0.1), (1500, 0.3)),
}


def loss_fn(model, x):
    return models.loss(model, x)


def clean():
    torch.cuda.synchronize()
    memory.release_cached("cuda")


@pytest.fixture(autouse=True, scope="module")
def no_garbage():
    """A collection in the middle of a test would make room."""
    gc.collect()


@pytest.fixture(autouse=True)
def settings():
    """settings(text): of the allocator; the plain ones before that, and after the test."""

    def begin(text):
        clean()
        torch._C._accelerator_setAllocatorSettings(PLAIN)
        torch._C._accelerator_setAllocatorSettings(text)

    yield begin
    gc.collect()  # an optimizer that a sizer guards is a cycle
    begin(PLAIN)


@pytest.fixture
def limit():
    """limit(bytes): that much more than the device's reserved bytes; none after the test."""

    def set_limit(more):
        clean()
        memory.set_limit("cuda", memory.stats("cuda").reserved_bytes + more)

    yield set_limit
    memory.set_limit("cuda", None)


def parts(name, rows):
    torch.manual_seed(0)
    case = models.CASES[name]
    return case.make().cuda(), case.batch(rows).cuda()


def reserved_by(model, x, pieces):
    """What a step of so many pieces adds to the reserved bytes of a pool without cached segments."""
    clean()
    before = memory.stats("cuda").reserved_bytes
    torch.cuda.reset_peak_memory_stats()
    brimful.BatchSizer(model, pieces=pieces).step(x, loss_fn)
    model.zero_grad()
    return torch.cuda.max_memory_reserved() - before


def fewest_pieces(model, x, at_most):
    """By running them: the first number of pieces that fits."""
    for pieces in range(1, at_most + 1):
        clean()
        try:
            brimful.BatchSizer(model, pieces=pieces, max_retries=0).step(x, loss_fn)
            return pieces
        except brimful.BatchTooLarge:
            continue
        finally:
            model.zero_grad()
    return None


def predicted(model, x, at_most=12):
    """The pieces of a first step that is predicted: nothing runs out, and it has the fewest that fit, or one more.

    None where `at_most` pieces do not fit.
    """
    fits = fewest_pieces(model, x, at_most)
    if fits is None:
        return None
    clean()
    refused = memory.stats("cuda").ooms
    outcome = brimful.BatchSizer(model, predict=True).step(x, loss_fn)
    model.zero_grad()
    assert (outcome.retries, memory.stats("cuda").ooms) == (0, refused)
    assert outcome.pieces <= fits + 1
    return outcome.pieces


@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", BATCHES)
def test_a_first_step_under_a_limit_runs_in_the_fewest_pieces_that_fit(settings, limit, text, name):
    settings(text)
    found = []
    for rows, share in BATCHES[name]:
        model, x = parts(name, rows)
        most, least = (reserved_by(model, x, pieces) for pieces in (1, 6))
        limit(int(least + share * (most - least)))
        found.append(predicted(model, x))
        memory.set_limit("cuda", None)
    assert found.count(None) <= 1


@pytest.fixture
def outside():
    """outside(bytes): takes so much of the device as another process would, past torch's allocator."""
    cuda = ctypes.CDLL("libcudart.so.13")
    taken = []

    def take(bytes):
        block = ctypes.c_void_p()
        assert cuda.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(bytes)) == 0
        taken.append(block)

    yield take
    for block in taken:
        cuda.cudaFree(block)


def test_without_a_limit_the_device_and_what_others_hold_of_it_count(outside):
    model, x = parts("MLP", 12000)
    room = int(0.45 * reserved_by(model, x, 1))
    clean()
    outside(torch.cuda.mem_get_info()[0] - room)
    assert predicted(model, x) > 1


def test_bytes_that_lie_in_pieces_are_no_room(limit):
    model, x = parts("MLP", 12000)
    need = reserved_by(model, x, 1)
    pairs = [
        torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")
        for _ in range(2 * need // (20 * MIB))
    ]
    before = memory.stats("cuda")
    held, pairs = pairs[::2], None  # every other one: 20 MiB segments, half of each in use
    limit(int(0.45 * need))
    cut_up = memory.stats("cuda").reserved_bytes - memory.stats("cuda").used_bytes
    assert cut_up > 0.3 * need, before
    assert predicted(model, x) > 1
    assert len(held) > 1


def test_a_step_predicted_has_the_gradient_of_the_whole(limit):
    model, x = parts("MLP", 12000)
    whole = copy.deepcopy(model)
    loss_fn(whole, x).backward()
    limit(int(0.45 * reserved_by(model, x, 1)))
    assert brimful.BatchSizer(model, predict=True).step(x, loss_fn).pieces > 1
    assert relative_difference(gradients_of(model), gradients_of(whole)) < 1e-5


def test_steps_run_out_of_memory_neither_first_nor_later(limit):
    model, x = parts("conv + BN", 256)
    need = reserved_by(model, x, 1)
    optimizer = torch.optim.Adam(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer, predict=True)
    refused, pieces = memory.stats("cuda").ooms, []
    for share in (1.5, 0.5, 0.4, 1.5):
        limit(int(share * need))
        for rows in (len(x), len(x), len(x) // 2):
            optimizer.zero_grad()
            pieces.append(sizer.step(x[:rows], loss_fn).pieces)
            optimizer.step()
    assert memory.stats("cuda").ooms == refused
    assert pieces[0] == pieces[-1] == 1
    assert min(pieces[3], pieces[6]) > 1
    assert pieces[6] >= pieces[3]


def test_a_plan_states_the_peak_of_a_step(limit):
    model, x = parts("encoder", 512)
    sizer = brimful.BatchSizer(model)
    sizer.plan(x, loss_fn)
    clean()
    plan = sizer.plan(x, loss_fn)
    assert plan.pieces == 1
    torch.cuda.reset_peak_memory_stats()
    outcome = sizer.step(x, loss_fn)
    assert abs(plan.peak_bytes / outcome.peak_bytes - 1) < 0.01
    assert abs(plan.reserved_bytes / torch.cuda.max_memory_reserved() - 1) < 0.01
    assert "reserved=" in repr(plan)
    assert plan.parameter_bytes == sum(p.nbytes for p in model.parameters())
    model.zero_grad()
    clean()
    limit(60 * MIB)
    plan = sizer.plan(x, loss_fn)
    assert plan.pieces > 1
    assert plan.peak_bytes < plan.reserved_bytes <= plan.limit_bytes
    assert plan.limit_bytes == memory.stats("cuda").limit_bytes
    limit(1 * MIB)  # not even one row fits
    plan = sizer.plan(x, loss_fn)
    assert plan.pieces == len(x)
    assert plan.reserved_bytes > plan.limit_bytes


@pytest.mark.parametrize("with_optimizer", [False, True], ids=["plain", "Adam"])
@pytest.mark.parametrize("name", ["ResNet", "encoder"])
def test_a_summary_states_the_peak_and_the_largest_batch(limit, name, with_optimizer):
    model, x = parts(name, 64)
    optimizer = torch.optim.Adam(model.parameters()) if with_optimizer else None
    found = brimful.summary(model, x, loss_fn=loss_fn, optimizer=optimizer)
    assert abs(found.predicted_bytes / found.peak_bytes - 1) < 0.01
    assert found.limit_bytes > 4 << 30  # the device's
    limit(3 * (found.peak_bytes - found.used_bytes))
    found = brimful.summary(model, x, loss_fn=loss_fn, optimizer=optimizer)
    assert found.limit_bytes == memory.stats("cuda").limit_bytes
    del x

    def step(rows):
        clean()
        batch = models.CASES[name].batch(rows).cuda()
        try:
            loss_fn(model, batch).backward()
            if optimizer is not None:
                optimizer.step()
        finally:
            model.zero_grad()

    step(found.largest_rows)
    with pytest.raises(torch.OutOfMemoryError):
        step(int(1.5 * found.largest_rows))


def test_a_summary_of_a_batch_that_does_not_fit_says_which_would(limit):
    model, x = parts("MLP", 30000)
    loss_fn(model, x[:2]).backward()  # cuBLAS's workspace
    limit(60 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        brimful.summary(model, x, loss_fn=loss_fn)
    (note,) = caught.value.__notes__
    assert note.startswith("the largest batch that fits: ")
    most = int(note.split()[-2])
    del caught, x  # its frames hold what fitted
    loss_fn(model, models.CASES["MLP"].batch(2).cuda()).backward()
    clean()
    batch = models.CASES["MLP"].batch(most).cuda()
    loss_fn(model, batch).backward()
    assert 1000 < most < 30000


OPTIMIZERS = {
    "Adam": {"lr": 0.01},
    "Adam, foreach off": {"lr": 0.01, "foreach": False},
    "Adam, fused": {"lr": 0.01, "fused": True},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_knows_the_optimizers_step(name):
    """Of so few rows that it is the peak; before and after its first one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(8))).cuda()
    x = torch.randn(4, 1500, device="cuda")
    optimizer = getattr(torch.optim, name.split(",")[0])(model.parameters(), **OPTIMIZERS[name])
    sizer = brimful.BatchSizer(model, optimizer)

    def square(model, x):
        return model(x).square().mean()

    sizer.plan(x, square)  # what is made once
    for _ in range(2):
        plan = sizer.plan(x, square)
        torch.cuda.reset_peak_memory_stats()
        sizer.step(x, square)
        whole = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        of_optimizer = torch.cuda.max_memory_allocated()
        optimizer.zero_grad()
        if name in ("Adam", "AdamW"):
            assert of_optimizer > whole
        peak = max(whole, of_optimizer)
        assert 0 <= plan.peak_bytes - peak <= 0.01 * peak
        assert plan.reserved_bytes >= plan.peak_bytes


def test_an_optimizer_whose_step_may_run_out_ends_no_step_on_cuda(limit):
    """Its room may be in the allocator's cache."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(8))).cuda()
    x = torch.randn(4, 1500, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer)
    sizer.plan(x, lambda model, x: model(x).square().mean())
    clean()
    memory.set_limit("cuda", memory.stats("cuda").reserved_bytes + 120 * MIB)
    sizer.step(x, lambda model, x: model(x).square().mean())
