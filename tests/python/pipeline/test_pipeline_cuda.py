"""Pipelines on CUDA devices. Skipped without them; those between devices need two."""

import copy
import subprocess
import sys

import pytest
import test_pipeline_draws as draws
import torch
import torch.nn.functional as F
from lost_ranks import CYCLES_A_S
from models import gradients_of, recomputed_stages, relative_difference, same_bits, values_of
from torch import nn

from brimful import Pipeline, split_sequential
from brimful.pipeline import pop, stash

pytestmark = pytest.mark.gpu
two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
NAP_S = 2  # of a device, in which the host makes its steps
LONGEST = 2_000_000  # cycles of a random sleep on the device


class Sleeps(torch.autograd.Function):
    """Passes its input on, when the device has slept for a random time; the same backwards."""

    @staticmethod
    def forward(ctx, x, generator):
        ctx.generator = generator
        torch.cuda._sleep(int(torch.randint(LONGEST, (), generator=generator)))
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(int(torch.randint(LONGEST, (), generator=ctx.generator)))
        return gradient * 1, None


class Sleepy(nn.Module):
    def __init__(self, inner, seed):
        super().__init__()
        self.inner = inner
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x):
        return Sleeps.apply(self.inner(Sleeps.apply(x, self.generator)), self.generator)


def model_of(stages, width=64):
    torch.manual_seed(0)
    layers = []
    for _ in range(stages):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers).double()


def reference(x, y, stages):
    model = model_of(stages)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.item(), gradients_of(model)


def on_cpu(gradients):
    return {name: gradient.cpu() for name, gradient in gradients.items()}


def check(devices, schedule, wrap=lambda stage, index: stage, steps=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 64, generator=generator, dtype=torch.float64)
    y = torch.randn(24, 64, generator=generator, dtype=torch.float64)
    count = len(devices)
    loss, gradients = reference(x, y, count)
    model = model_of(count)
    stages = [wrap(s, i) for i, s in enumerate(split_sequential(model, [2] * count))]
    pipe = Pipeline(stages, devices=devices, schedule=schedule, microbatches=6, loss_fn=F.mse_loss)
    target = y.to(devices[-1])
    for _ in range(steps):
        outcome = pipe.step(x, target)
        assert outcome.loss == pytest.approx(loss, rel=1e-10)
        assert relative_difference(on_cpu(gradients_of(model)), gradients) < 1e-10
        model.zero_grad()
    return pipe


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_stages_of_the_cpu_and_a_device_pass_messages_both_ways(schedule):
    check(["cpu", "cuda:0"], schedule)
    check(["cuda:0", "cpu"], schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_two_stages_share_a_device(schedule):
    check(["cuda:0", "cuda:0"], schedule, Sleepy)


@pytest.mark.parametrize("devices", [["cuda:0"] * 3, ["cuda:0", "cpu", "cuda:0"]])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_stages_that_share_a_device_draw_in_turns(devices, checkpointed):
    stages = draws.made(checkpointed=checkpointed)
    for stage, device in zip(stages, devices, strict=True):
        stage.to(device)
    x, y = (t.to(devices[0]) for t in draws.data())
    found = []
    for _ in range(2):
        pipe = draws.pipe_of(stages, schedule="1f1b", devices=devices)
        torch.manual_seed(7)
        steps = []
        for _ in range(5):
            gradients, masks = drawn_step(stages, pipe, x, y)
            assert relative_difference(gradients, masks) < 1e-12
            steps.append(gradients)
        found.append((steps, torch.rand(1, device=devices[0]).item()))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert relative_difference(one, other) == 0, "a seed gives the same steps"
    assert found[0][1] == found[1][1]


def drawn_step(stages, pipe, x, y):
    """The step's gradients, and those that the masks of its forwards give, on the CPU."""
    for stage in stages:
        stage.masks.clear()
        stage.calls = 0
    pipe.step(x, y)
    gradients = on_cpu(gradients_of(stages))
    stages.zero_grad()
    whole = copy.deepcopy(stages).cpu()
    for stage in whole:  # a recomputation draws the same once more
        unique = []
        for _, mask in stage.masks:
            if not any(torch.equal(mask.cpu(), one) for one in unique):
                unique.append(mask.cpu())
        stage.masks[:] = unique[-4:]  # of the attempt that stands: the first step is repeated
    return gradients, draws.from_masks(whole, 4, x.cpu(), y.cpu())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_recomputed_stages_leave_the_bits_of_a_step_without(schedule):
    x, y = (torch.randn(8, 64, dtype=torch.float64, device="cuda") for _ in range(2))

    def left(recompute):
        model = model_of(2).cuda()
        model.insert(2, nn.Dropout(0.3))
        torch.cuda.manual_seed(3)
        pipe = Pipeline(
            split_sequential(model, [3, 2]),
            schedule=schedule,
            microbatches=4,
            loss_fn=F.mse_loss,
            recompute=recompute,
        )
        outcomes = [pipe.step(x, y) for _ in range(2)]
        assert recomputed_stages(outcomes[1]) == ([0, 1] if recompute else [])
        return [p.grad for p in model.parameters()] + [torch.cuda.get_rng_state()]

    for one, other in zip(left("all"), left(()), strict=True):
        assert torch.equal(one, other)


# In a process of its own: what other tests leave in torch's pools is room that no limit of this one takes away.
OFFLOADED = """
import torch, torch.nn.functional as F
import brimful
from brimful import Pipeline
from torch import nn

x, y = (torch.randn(4, 4096, 64, device="cuda") for _ in range(2))

def step(limit=None):
    torch.manual_seed(0)
    stages = [
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16))).cuda()
        for _ in range(2)
    ]
    pipe = Pipeline(stages, microbatches=4, loss_fn=F.mse_loss, ladder=["split", "offload"])
    torch.cuda.empty_cache()
    before = brimful.memory.stats("cuda")
    if limit is not None:
        brimful.memory.set_limit("cuda", before.reserved_bytes + limit)
    outcome = pipe.step(x, y)
    gradients = [p.grad for stage in stages for p in stage.parameters()]
    return outcome, gradients, outcome.peak_bytes - before.used_bytes

plain, expected, peak = step()
assert not plain.rungs
outcome, found, _ = step(2 * peak // 3)
assert len(outcome.rungs.offloaded) == 2 and outcome.pieces == 4, outcome
assert all(map(torch.equal, found, expected))
"""


def test_what_stages_save_is_offloaded_to_the_host():
    done = subprocess.run(
        [sys.executable, "-c", OFFLOADED], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_a_step_runs_on_the_callers_stream():
    streams = []

    class Seen(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            streams.append(torch.cuda.current_stream())
            return self.inner(x)

    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        check(["cuda:0", "cuda:0"], "1f1b", lambda stage, index: Seen(stage), steps=1)
    assert streams == [own] * len(streams)
    torch.cuda.synchronize()


@two_devices
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_devices_that_sleep_at_random_do_not_change_results(schedule):
    check(["cuda:0", "cuda:1"], schedule, Sleepy, steps=10)


@two_devices
def test_memory_is_not_used_again_before_it_was_copied():
    """Each microbatch's output is freed at once, and its memory written by what comes next on its device."""

    class Overwrites(nn.Module):
        def forward(self, x):
            torch.cuda._sleep(LONGEST)
            out = x * 1
            del x
            return out

    class Copies(nn.Module):
        def forward(self, x):
            for _ in range(4):  # takes what was freed, if it is given out
                torch.full_like(x, -1.0)
            return x * 1

    pipe = Pipeline(
        [Overwrites(), Copies(), nn.Identity()],
        devices=["cuda:0", "cuda:1", "cuda:0"],
        microbatches=16,
    )
    x = torch.arange(16.0).repeat_interleave(1 << 12).reshape(16, -1)
    for _ in range(20):
        assert torch.equal(pipe.forward(x).cpu(), x)


@two_devices
def test_skips_between_devices_wait_for_their_copies():
    a, b = (nn.Linear(64, 64).double().to(f"cuda:{i}") for i in range(2))

    def first(x):
        torch.cuda._sleep(LONGEST)
        h = a(x)
        stash("h", h)
        return h.tanh()

    def last(x):
        return b(x) + pop("h")

    x = torch.randn(12, 64, dtype=torch.float64)
    pipe = Pipeline([first, last], devices=["cuda:0", "cuda:1"], microbatches=6)
    for _ in range(10):
        h = a(x.cuda(0))
        expected = b(h.tanh().cuda(1)) + h.cuda(1)
        torch.testing.assert_close(pipe.forward(x), expected)


@pytest.mark.real_gpu  # it looks at the times of kernels
@two_devices
def test_copies_run_beside_the_computing_of_both_devices():
    """In the profile some copy between the devices lies within a kernel's time on its source."""
    from torch.profiler import ProfilerActivity, profile

    width = 2048
    layers = [nn.Linear(width, width) for _ in range(2)]
    pipe = Pipeline(
        layers, devices=["cuda:0", "cuda:1"], schedule="gpipe", microbatches=8, loss_fn=F.mse_loss
    )
    x = torch.randn(8 * 4096, width)
    target = x.to("cuda:1")
    pipe.step(x, target)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        pipe.step(x, target)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
    copies, kernels = [], []
    for event in seen.events():
        span = (event.time_range.start, event.time_range.end)
        is_copy = "Memcpy" in event.name and ("PtoP" in event.name or "DtoD" in event.name)
        (copies if is_copy else kernels).append(span)
    assert copies
    assert any(k[0] < c[1] and c[0] < k[1] for c in copies for k in kernels if k[1] - k[0] > 0)


def steps_ahead(asleep):
    """Values after three steps, and whether they ended before the devices had begun."""
    devices = ["cuda:0", "cuda:1"]
    model = model_of(2)
    pipe = Pipeline(
        split_sequential(model, [2, 2]), devices=devices, microbatches=3, loss_fn=F.mse_loss
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 64, generator=generator, dtype=torch.float64).to(devices[0])
    y = torch.randn(24, 64, generator=generator, dtype=torch.float64).to(devices[1])
    begun, outcomes = [], []
    for step in range(8):
        if step == 5:
            for device in devices:
                torch.cuda.synchronize(device)
                with torch.cuda.device(device):
                    if asleep:
                        torch.cuda._sleep(NAP_S * CYCLES_A_S)
                    begun.append(torch.cuda.current_stream().record_event())
        outcomes.append(pipe.step(x, y))
        optimizer.step()
        optimizer.zero_grad()
    ahead = [not event.query() for event in begun]
    for device in devices:
        torch.cuda.synchronize(device)
    losses = [outcome.loss for outcome in outcomes]
    return ahead, losses, {name: value.cpu() for name, value in values_of(model).items()}


@two_devices
def test_three_steps_end_while_the_devices_have_done_nothing():
    ahead, losses, values = steps_ahead(asleep=True)
    assert all(ahead)
    none, expected, its_values = steps_ahead(asleep=False)
    assert not any(none)
    assert losses == expected
    assert same_bits(values, its_values)
