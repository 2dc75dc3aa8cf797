"""Pipelines whose ranks are processes with a CUDA device each. Skipped without two; what is refused needs none."""

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from torch import nn

import brimful

LONGEST = 2_000_000  # cycles of a random sleep on the device
two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)


class Sleepy(nn.Module):
    def __init__(self, inner, seed):
        super().__init__()
        self.inner, self.generator = inner, torch.Generator().manual_seed(seed)
        self.calls, self.fails_in = 0, None

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails_in:
            raise RuntimeError("planted")
        torch.cuda._sleep(int(torch.randint(LONGEST, (), generator=self.generator)))
        return self.inner(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, dtype=torch.float64) for _ in range(4)))


def group_on_devices(rank):
    torch.cuda.set_device(rank)
    return torch.distributed.new_group(backend="cpu:gloo,cuda:nccl")


def train(here, schedule, tie):
    rank, device = here.index, torch.device("cuda", here.index)
    x, y = torch.randn(2, 24, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = net()
    if tie:
        whole[3].weight = whole[0].weight
    loss = F.mse_loss(whole(x), y)
    loss.backward()
    model = net()
    stage = Sleepy(brimful.split_sequential(model, [2, 2])[rank], rank).to(device)
    pipe = brimful.Pipeline(
        [stage],
        group=group_on_devices(rank),
        schedule=schedule,
        microbatches=6,
        loss_fn=F.mse_loss,
        tied={"weight": model[3 * rank].weight} if tie else None,
    )
    for step in range(6):
        stage.fails_in = stage.calls + 3 if step % 3 == 1 and rank == step // 3 else None
        if step % 3 == 1:
            with pytest.raises(RuntimeError, match="planted"):
                pipe.step(x, y.to(device))
            continue
        outcome = pipe.step(x, y.to(device))
        assert outcome.loss == pytest.approx(loss.item(), rel=1e-10)
        own = {n: g.cpu() for n, g in gradients_of(model).items() if int(n[0]) // 2 == rank}
        right = gradients_of(whole)
        if tie:
            right["3.weight"] = whole[0].weight.grad
        expected = {n: right[n] for n in own}
        assert relative_difference(own, expected) < 1e-10
        model.zero_grad()
    return True


@pytest.mark.gpu
@two_devices
@pytest.mark.parametrize("schedule, tie", [("gpipe", False), ("1f1b", True), ("zb_h1", False)])
def test_devices_that_sleep_at_random_give_the_gradients_of_the_whole_model(ranks, schedule, tie):
    assert ranks(train, schedule, tie, watchdog_s=120, timeout_s=60) == [True, True]


def overwrite(here):
    rank, device = here.index, torch.device("cuda", here.index)

    def overwrites(x):
        torch.cuda._sleep(LONGEST)
        out = x * 1
        del x
        for _ in range(4):  # takes what was freed, if it is given out
            torch.full_like(out, -1.0)
        return out

    pipe = brimful.Pipeline(
        [overwrites], group=group_on_devices(rank), devices=[device], microbatches=16
    )
    x = torch.arange(16.0).repeat_interleave(1 << 12).reshape(16, -1)
    for _ in range(20):
        out = pipe.forward(x)
        assert out is None if rank == 0 else torch.equal(out.cpu(), x)
    return True


@pytest.mark.gpu
@two_devices
def test_memory_is_not_used_again_before_it_was_sent(ranks):
    assert ranks(overwrite, watchdog_s=120, timeout_s=60) == [True, True]


def refuse(here):
    gloo = torch.distributed.group.WORLD
    with pytest.raises(ValueError, match="cpu:gloo,cuda:nccl"):
        brimful.Pipeline([abs], group=gloo, devices=["cuda:0"])
    with pytest.raises(ValueError, match=r"all its stages on one device .*cpu, cuda:0"):
        brimful.Pipeline([abs], group=gloo, devices=["cpu", "cuda:0"])
    with pytest.raises(ValueError, match=r"on the CPU or on CUDA devices .*meta"):
        brimful.Pipeline([abs], group=gloo, devices=["meta"])
    return True


def test_a_group_without_what_the_devices_need_is_refused_before_anything_runs(ranks):
    assert ranks(refuse) == [True, True]
