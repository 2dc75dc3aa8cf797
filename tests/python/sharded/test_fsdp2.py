"""Training a model of fully_shard under a BatchSizer."""

import time

import pytest
import torch
from rank_processes import raised
from sharded_models import Fault, Kill, Net, Trial, batch_of, loss_fn, sharded, worst
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import brimful

CLOSE = 1e-5


def trained(rank, with_sizer):
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    sizer = brimful.BatchSizer(model, optimizer) if with_sizer else None
    norms = []
    for step in range(4):
        batch = batch_of(6, 10 * step + rank.index)
        if sizer is None:
            loss_fn(model, batch).backward()
        else:
            with Fault(150 if (step, rank.index) == (2, 1) else -1):
                sizer.step(batch, loss_fn)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.full_tensor() for n, p in model.named_parameters()}, norms, float(model.seen)


def as_without(rank):
    plain, plain_norms, plain_seen = trained(rank, False)
    rank.progress()
    ours, our_norms, our_seen = trained(rank, True)
    close = torch.allclose(torch.tensor(plain_norms), torch.tensor(our_norms), atol=CLOSE)
    return worst(ours, plain), close, our_seen - plain_seen


def test_a_loop_trains_as_without_a_sizer(ranks):
    for distance, same_norms, more_calls in ranks(as_without):
        assert distance < CLOSE
        assert same_norms
        # Two steps were made of two pieces; nothing is left of rehearsals and of what failed.
        assert more_calls == 2


def back_to_fsdp(rank):
    model = sharded()
    brimful.BatchSizer(model).step(batch_of(4, rank.index), loss_fn)
    model.zero_grad()
    loss_fn(model, batch_of(4, rank.index)).backward()
    ours = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    other = sharded()
    loss_fn(other, batch_of(4, rank.index)).backward()
    theirs = {n: p.grad.full_tensor() for n, p in other.named_parameters() if p.grad is not None}
    return worst(ours, theirs)


def test_a_backward_outside_of_steps_divides_as_ever(ranks):
    assert ranks(back_to_fsdp) == [0, 0]


def in_half_the_memory(rank):
    trial = Trial(rank, rows=(64, 64))
    trial.begin()
    outcome = trial.step()
    peak = outcome.peak_bytes
    used = brimful.memory.stats("cpu").used_bytes
    trial.begin()
    if rank.index == 1:
        brimful.memory.set_limit("cpu", used + (peak - used) // 2)
    try:
        outcome = trial.step()
    finally:
        brimful.memory.set_limit("cpu", None)
    return outcome.split, outcome.retries, worst(trial.result(), trial.expected)


def test_a_rank_with_half_the_memory_makes_all_repeat_in_pieces(ranks):
    for split, retries, distance in ranks(in_half_the_memory):
        assert len(split) > 1
        assert retries >= 1
        assert distance < CLOSE


def first_step_fails(rank, how):
    model = sharded()
    sizer = brimful.BatchSizer(model)

    def step():
        if rank.index == 0:
            return sizer.step(batch_of(4, 0), loss_fn)
        if how == "input":
            return sizer.step(torch.tensor(3), loss_fn)
        return sizer.step(brimful.NO_DATA, loss_fn)

    error = raised(step)
    sizer.step(batch_of(4, rank.index), loss_fn)  # nothing is left of it
    return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [("input", "RankFailed", "TypeError"), ("data", "ValueError", "ValueError")],
)
def test_a_first_step_that_fails_before_its_pieces(ranks, how, first, second):
    (one, text), (other, _) = ranks(first_step_fails, how)
    assert (one, other) == (first, second)
    assert "rank" in text


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skips = False

    def forward(self, x):
        for i, part in enumerate(self.parts):
            x = x if i == 1 and self.skips else part(x)
        return x


def parts_from_its_tape(rank, fails):
    model = Branching()
    for part in model.parts:
        fully_shard(part)
    fully_shard(model)
    sizer = brimful.BatchSizer(model)
    batch = torch.randn(4, 4)

    def loss(m, piece):
        result = m(piece).square().mean()
        if fails and rank.index == 1 and m.skips:
            raise ValueError("planted")
        return result

    sizer.step(batch, loss)
    model.zero_grad()
    model.skips = True
    began = time.monotonic()
    error = raised(lambda: sizer.step(batch, loss))
    return error if error is None else type(error).__name__, time.monotonic() - began


def test_a_step_with_other_collectives_goes_on(ranks):
    assert [error for error, _ in ranks(parts_from_its_tape, False)] == [None, None]


def test_a_rank_that_fails_with_other_collectives_ends_all_at_once(ranks):
    (first, waited), (second, _) = ranks(parts_from_its_tape, True)
    assert (first, second) == ("RankFailed", "ValueError")
    assert waited < 5


def killed(rank, at):
    return Trial(rank).error_of(Kill(at) if rank.index == 1 else Fault(-1))


@pytest.mark.parametrize("at", [10, 150])
def test_a_rank_that_is_killed(ranks, at):
    (error, text, waited), _ = ranks(killed, at, lost=(1,))
    assert error == "RankFailed", text
    assert "rank" in text
    assert waited < 8


def refused(rank):
    texts = {}
    model = sharded()
    texts["lockstep"] = raised(lambda: brimful.BatchSizer(model, lockstep=False))
    sizer = brimful.BatchSizer(model)
    texts["plan"] = raised(lambda: sizer.plan(batch_of(4, 0), loss_fn))
    texts["rule"] = raised(lambda: brimful.BatchSizer(model, loss_rule="find"))
    model.set_requires_gradient_sync(False)
    texts["sync"] = raised(lambda: sizer.step(batch_of(4, 0), loss_fn))
    model.set_requires_gradient_sync(True)
    model.twice.set_gradient_divide_factor(3.0)
    texts["factor"] = raised(lambda: brimful.BatchSizer(model))
    texts["ddp"] = raised(lambda: brimful.DistributedDataParallel(sharded()))
    both = [sharded(), brimful.DistributedDataParallel(nn.Linear(4, 4))]
    texts["both"] = raised(lambda: brimful.BatchSizer(both))
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(half[0])
    texts["half"] = raised(lambda: brimful.BatchSizer(half))
    return {name: (type(e).__name__, str(e)) for name, e in texts.items()}


def test_what_is_refused_says_what_to_do(ranks):
    for texts in ranks(refused):
        assert texts["lockstep"][0] == "ValueError" and "leave it out" in texts["lockstep"][1]
        assert texts["factor"][0] == "ValueError" and "weigh the loss" in texts["factor"][1]
        assert texts["ddp"][0] in ("TypeError", "ValueError") and "BatchSizer" in texts["ddp"][1]
        assert texts["plan"][0] == "ValueError" and "let step find" in texts["plan"][1]
        assert texts["rule"][0] == "ValueError" and "say it" in texts["rule"][1]
        assert texts["sync"][0] == "ValueError" and "accumulate=True" in texts["sync"][1]
        assert texts["both"][0] == "TypeError" and "divide all of them" in texts["both"][1]
        assert texts["half"][0] == "ValueError" and "wrap" in texts["half"][1]


def without_zero_grad(rank):
    model = sharded()
    sizer = brimful.BatchSizer(model)
    sizer.step(batch_of(4, rank.index), loss_fn)
    error = raised(lambda: sizer.step(batch_of(4, rank.index), loss_fn))
    model.zero_grad(set_to_none=False)
    sizer.step(batch_of(4, rank.index), loss_fn)
    return type(error).__name__, str(error)


def test_gradients_that_are_left(ranks):
    for error, text in ranks(without_zero_grad):
        assert error == "ValueError"
        assert "call optimizer.zero_grad()" in text


def test_one_rank_alone(ranks):
    (result,) = ranks(alone, size=1)
    assert result == ([2, 2], True)


def alone(rank):
    calls = []

    def counted(model, piece):
        calls.append(len(piece[0]))
        return loss_fn(model, piece)

    brimful.BatchSizer(sharded()).step(batch_of(4, 0), counted)
    assert calls == [4]  # nothing is rehearsed for nobody
    trial = Trial(rank, rows=(4,))
    trial.begin()
    with Fault(40):
        outcome = trial.step()
    return outcome.split, worst(trial.result(), trial.expected) < CLOSE


def test_a_module_that_is_not_sharded_is_as_before():
    net = Net()
    assert brimful.BatchSizer(net)._sharded is None


def without_a_way_back(rank):
    with_one = hasattr(FSDPModule, "reset_iter_state")
    if with_one:
        del FSDPModule.reset_iter_state
    model = fully_shard(nn.Linear(4, 4))
    error = raised(lambda: brimful.BatchSizer(model))
    return type(error).__name__, str(error)


@pytest.mark.smoke
def test_a_torch_without_a_way_back_is_refused(ranks):
    for error, text in ranks(without_a_way_back):
        assert error == "TypeError"
        assert "torch 2.15" in text
