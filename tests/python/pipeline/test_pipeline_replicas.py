"""Data parallel and pipeline in one program: two replicas of two stages, each rank a process over gloo."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import gradients_of, relative_difference
from rank_processes import raised
from torch import nn

import brimful

ROWS = (11, 7)  # of the replicas
MICROBATCHES = 4


class Planted(nn.Module):
    """Fails in its forward, or where its parameters get their gradients."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.at, self.error = inner, 0, None, None
        for parameter in inner.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.call())

    def call(self):
        self.calls += 1
        if self.calls - 1 == self.at:
            raise self.error

    def forward(self, x):
        self.call()
        return self.inner(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sum(ROWS), 6, generator=generator, dtype=torch.float64) for _ in range(2)]


class Grid:
    """A rank of the four: its stage, in a pipeline with one group and reduced over another.

    With ``tie`` the first layer and the last one have the same weight.
    """

    def __init__(self, here, schedule="1f1b", loss_fn=F.mse_loss, tie=False):
        self.replica, self.rank = divmod(here.index, 2)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        self.model = net()
        ends = self.model[0].weight, self.model[3].weight
        if tie:
            ends[1].data.copy_(ends[0])
        x, y = data()
        loss = loss_fn(self.model(x), y)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        self.loss, self.expected = loss.item(), gradients_of(self.model)
        if tie:
            both = self.expected["0.weight"] + self.expected["3.weight"]
            self.expected.update({"0.weight": both, "3.weight": both})
        self.model.zero_grad()
        begin = self.replica * ROWS[0]
        end = begin + ROWS[self.replica]
        self.x, self.y = x[begin:end], y[begin:end]
        self.stage = Planted(brimful.split_sequential(self.model, [2, 2])[self.rank])
        self.wrapped = brimful.DistributedDataParallel(
            self.stage, device_mesh=mesh["dp"], bucket_cap_mb=0.0001
        )
        self.pipe = brimful.Pipeline(
            [self.wrapped],
            group=mesh["pp"].get_group(),
            schedule=schedule,
            microbatches=MICROBATCHES,
            loss_fn=loss_fn,
            tied={"ends": ends[self.rank]} if tie else None,
        )

    def step(self):
        return self.pipe.step(self.x, self.y)

    def close(self):
        own = {
            name: g
            for name, g in gradients_of(self.model).items()
            if int(name[0]) // 2 == self.rank
        }
        return relative_difference(own, {name: self.expected[name] for name in own}) < 1e-12


def train(here, schedule):
    grid = Grid(here, schedule)
    optimizer = torch.optim.SGD(grid.wrapped.parameters(), lr=0.1)
    outcome = grid.step()
    assert outcome.loss == pytest.approx(grid.loss, rel=1e-12)
    assert outcome.weight == sum(ROWS)
    assert grid.close()
    before = [p.detach().clone() for p in grid.wrapped.parameters()]
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        grid.step()
    with torch.no_grad():
        out = grid.pipe.forward(grid.x)
    assert (out is None) == (grid.rank == 0)
    after = [p.detach().clone() for p in grid.wrapped.parameters()]
    assert not torch.equal(before[0], after[0])
    return grid.rank, [p.tolist() for p in after]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_replicas_get_the_mean_over_the_rows_of_all(ranks, schedule):
    results = ranks(train, schedule, size=4)
    assert results[0] == results[2]
    assert results[1] == results[3]
    reference = net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = data()
    for _ in range(3):
        F.mse_loss(reference(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [p.detach() for p in reference.parameters()]
    found = [torch.tensor(p, dtype=torch.float64) for rank in (0, 1) for p in results[rank][1]]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-11)


def tie(here, schedule):
    grid = Grid(here, schedule, tie=True)
    for _ in range(2):
        grid.step()
        assert grid.close()
        grid.model.zero_grad()
    for failing in range(4):
        grid.stage.calls, grid.stage.at = 0, 2 if here.index == failing else None
        grid.stage.error = KeyError("planted")
        assert raised(grid.step) is not None
        grid.stage.at = None
        grid.step()
        assert grid.close(), failing
        grid.model.zero_grad()
    return True


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_tied_weights_have_the_sum_over_stages_of_the_mean_over_replicas(ranks, schedule):
    assert ranks(tie, schedule, size=4) == [True] * 4


def fail(here, schedule, error):
    grid = Grid(here, schedule)
    grid.step()
    calls = grid.stage.calls  # of a step: forwards, and gradients that came
    grid.model.zero_grad()
    slowest = 0.0
    for failing in range(4):
        for at in range(calls):
            grid.stage.calls = 0
            grid.stage.at = at if here.index == failing else None
            grid.stage.error = error
            caught = raised(grid.step)
            wanted = type(error) if here.index == failing else brimful.RankFailed
            assert isinstance(caught, wanted), (failing, at, caught)
            assert "planted" in str(caught)
            slowest = max(slowest, caught.seconds)
            if here.index != failing:
                assert caught.rank == failing % 2
                assert f"rank {failing % 2} of replica {failing // 2}" in str(caught)
            assert all(p.grad is None for p in grid.wrapped.parameters())
            grid.stage.at = None
            grid.step()
            assert grid.close(), (failing, at)
            grid.model.zero_grad()
    return slowest


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_failure_of_any_rank_is_raised_on_all_four(ranks, schedule):
    slowest = ranks(fail, schedule, KeyError("planted"), size=4, watchdog_s=60)
    assert max(slowest) < 2


def run_out(here, failing_ranks, at):
    grid = Grid(here)
    for failing in failing_ranks:
        grid.stage.calls = 0
        grid.stage.at = at if here.index == failing else None
        grid.stage.error = torch.OutOfMemoryError("planted")
        outcome = grid.step()
        assert outcome.retries == 1
        assert grid.close(), failing
        grid.model.zero_grad()
    return outcome.pieces


@pytest.mark.parametrize(("failing", "microbatches"), [((0, 3), (6, 7)), ((2, 1), (8, 7))])
@pytest.mark.parametrize("at", [0, 7])
def test_memory_that_runs_out_on_one_rank_is_repeated_on_all_four(ranks, failing, microbatches, at):
    """In the step after 8 microbatches 11 rows make 6 of 2 rows, as the largest that fitted."""
    first, second = microbatches
    assert ranks(run_out, failing, at, size=4) == [first, first, second, second]


def refuse(here):
    grid = Grid(here)
    bad = [object(), {}, grid.x[:3], grid.x[:0]]
    for failing in range(4):
        for batch in bad:
            began = time.monotonic()
            with pytest.raises((ValueError, TypeError, brimful.RankFailed)):
                grid.pipe.step(batch if here.index == failing else grid.x, grid.y)
            assert time.monotonic() - began < 2
    grid.step()
    return grid.close()


def test_a_bad_batch_on_one_rank_leaves_no_other_waiting(ranks):
    assert ranks(refuse, size=4) == [True] * 4


def test_a_stage_of_torchs_data_parallel_is_refused(ranks):
    ranks(wrap_in_torchs, size=2)


def wrap_in_torchs(here):
    stage = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"brimful\.DistributedDataParallel"):
        brimful.Pipeline([stage], group=dist.group.WORLD, loss_fn=F.mse_loss)


class Counting(nn.Module):
    """Assigns a buffer anew in each forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen = self.seen + x.detach().sum()
        return self.inner(x)


def count_in_one_process(here, recompute):
    """Each process is a replica of both stages."""
    torch.manual_seed(0)
    stages = [brimful.DistributedDataParallel(Counting()) for _ in range(2)]
    pipe = brimful.Pipeline(
        stages,
        devices=["cpu", "cpu"],
        microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
        recompute=recompute,
    )
    torch.manual_seed(here.index)
    total, found = 0.0, []
    for _ in range(3):
        x = torch.randn(8, 6, dtype=torch.float64)
        pipe.step(x, torch.zeros_like(x))
        total += x.sum().item()
        found.append([stage.module.seen.item() for stage in stages])
    return found, total


@pytest.mark.parametrize("recompute", [(), "all"])
def test_buffers_that_are_assigned_anew_are_those_of_one_replica(ranks, recompute):
    (found, total), (other, _) = ranks(count_in_one_process, recompute, size=2)
    assert found == other
    assert found[-1][0] == pytest.approx(total, rel=1e-12)
