"""Forecasts on CUDA of what follows no law in the rows (workspaces of libraries): too large rather than too small."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from test_cuda_prediction import MIB, clean, limit, loss_fn, no_garbage, parts, settings

import brimful
from brimful import memory

__all__ = ["limit", "no_garbage", "settings"]  # fixtures
pytestmark = pytest.mark.gpu
SIMULATED = hasattr(ctypes.CDLL(None), "sim_cuda_calls")


class Scratch(torch.autograd.Function):
    """Needs scratch for its call, as a library's kernel may: much more from `jump` rows on."""

    @staticmethod
    def forward(x, jump):
        return x * 1

    @staticmethod
    def setup_context(context, inputs, output):
        x, context.jump = inputs
        Scratch.take(x, context.jump)

    @staticmethod
    def backward(context, gradient):
        Scratch.take(gradient, context.jump)
        return gradient * 1, None

    @staticmethod
    def take(x, jump):
        torch.empty(len(x) * (16384 if len(x) < jump else MIB), dtype=torch.uint8, device="cuda")


class WithScratch(torch.nn.Module):
    def __init__(self, jump):
        super().__init__()
        torch.manual_seed(0)
        self.jump = jump
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = Scratch.apply(layer(x), self.jump)
        return x


def square(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("jump", [3, 6, 12, 16])
def test_a_plan_is_not_short_of_scratch_that_jumps_and_says_its_margin(limit, jump):
    model = WithScratch(jump).cuda()
    for rows in (64, 200, jump, jump + 1, jump - 1):
        x = torch.randn(max(rows, 3), 1024, device="cuda")
        sizer = brimful.BatchSizer(model)
        sizer.plan(x, square)
        clean()
        plan = sizer.plan(x, square)
        torch.cuda.reset_peak_memory_stats()
        outcome = sizer.step(x, square)
        model.zero_grad()
        assert plan.pieces == outcome.pieces == 1
        assert plan.peak_bytes >= outcome.peak_bytes
        assert plan.reserved_bytes >= torch.cuda.max_memory_reserved()
        seen = len(x) > 3 and len(x) >= jump  # of two, three and the most rows that are run
        assert (plan.margin_bytes > 0) == seen
        assert ("margin=" in repr(plan)) == seen
    limit(130 * MIB)
    x, refused = torch.randn(200, 1024, device="cuda"), memory.stats("cuda").ooms
    outcome = brimful.BatchSizer(model, predict=True).step(x, square)
    assert outcome.pieces > 1
    assert (outcome.retries, memory.stats("cuda").ooms) == (0, refused)


def test_a_plan_without_scratch_has_no_margin():
    model, x = parts("MLP", 187)
    plan = brimful.BatchSizer(model).plan(x, loss_fn)
    assert (plan.margin_bytes, plan.workspaces_unknown) == (0, False)
    assert "margin" not in repr(plan)
    assert "workspaces" not in repr(plan)


def test_a_summary_says_what_its_prediction_may_be_short_by():
    found = brimful.summary(
        WithScratch(12).cuda(), torch.randn(64, 1024, device="cuda"), loss_fn=square
    )
    assert found.margin_bytes > 0
    assert ", may be short by " in str(found)
    assert found.predicted_bytes >= found.peak_bytes


def test_workspaces_of_cudnns_benchmark_mode_are_said_to_be_unknown():
    model, x = parts("MLP", 187)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        plan = brimful.BatchSizer(model).plan(x, loss_fn)
        found = brimful.summary(model, x, loss_fn=loss_fn)
    assert plan.workspaces_unknown
    assert "workspaces unknown" in repr(plan)
    assert found.workspaces_unknown
    assert "workspaces that cuDNN's benchmark mode tries" in str(found)


# In a process whose convolutions take workspaces that jump. Pieces of more rows, and of fewer, than the jump.
CONVOLUTIONS = """
import os, sys, torch, brimful
from brimful import memory
from test_cuda_prediction import BATCHES, clean, fewest_pieces, loss_fn, parts, reserved_by

name, jump = sys.argv[1], int(sys.argv[2])
for rows in (48, jump, jump + 3, jump - 2):
    model, x = parts(name, max(rows, 3))
    sizer = brimful.BatchSizer(model)
    sizer.plan(x, loss_fn)
    clean()
    plan = sizer.plan(x, loss_fn)
    torch.cuda.reset_peak_memory_stats()
    outcome = sizer.step(x, loss_fn)
    model.zero_grad()
    assert plan.pieces == outcome.pieces == 1
    assert plan.peak_bytes >= outcome.peak_bytes, (rows, plan, outcome)
    assert plan.reserved_bytes >= torch.cuda.max_memory_reserved(), (rows, plan)
    assert plan.margin_bytes > 0 or len(x) < jump, (rows, plan)
model, x = parts(name, 48)
most, least = (reserved_by(model, x, pieces) for pieces in (1, 6))
clean()
memory.set_limit("cuda", memory.stats("cuda").reserved_bytes + int(least + 0.5 * (most - least)))
fits = fewest_pieces(model, x, 12)
clean()
refused = memory.stats("cuda").ooms
outcome = brimful.BatchSizer(model, predict=True).step(x, loss_fn)
assert (outcome.retries, memory.stats("cuda").ooms) == (0, refused), outcome
print(outcome.pieces, fits, flush=True)
os._exit(0)  # an autograd thread may still end
"""


@pytest.mark.parametrize("jump", [6, 12, 16])
@pytest.mark.parametrize("name", ["ResNet", "U-Net"])
def test_a_plan_is_not_short_where_convolutions_take_workspaces_that_jump(name, jump):
    if not SIMULATED:
        pytest.skip("a workspace of the simulated device, whose size is known")
    done = subprocess.run(
        [sys.executable, "-c", CONVOLUTIONS, name, str(jump)],
        env={
            **os.environ,
            "SIM_CUDA_CONV_WORKSPACE": str(jump),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    pieces, fits = map(int, done.stdout.split())
    assert fits <= pieces <= fits + 2
