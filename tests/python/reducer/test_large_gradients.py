"""Large gradients are reduced where autograd left them."""

import copy
import time

import pytest
import torch
from models import gradients_of, relative_difference, same_bits, values_of

import brimful
from brimful import _C

WIDTH = 1030  # a weight of 4.05 MiB
CAP = 4 << 20


class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.unused = torch.nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=dtype))
        self.second = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.use = False

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return x @ self.unused if self.use else x


def batch(rank, rows=3):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, WIDTH, generator=generator)


def loss_of(model, x):
    return model(x).square().mean()


def mean_gradients(module, xs):
    """Of one process over all rows: rows weigh the same."""
    module = copy.deepcopy(module)
    rows = sum(len(x) for x in xs)
    sum(loss_of(module, x) * (len(x) / rows) for x in xs).backward()
    return gradients_of(module)


def close(model, expected):
    mine = gradients_of(model)
    none = [name for name in mine if mine[name] is None]
    assert none == [name for name in expected if expected[name] is None]
    kept = [name for name in mine if name not in none]
    assert relative_difference({n: mine[n] for n in kept}, {n: expected[n] for n in kept}) < 2e-6


def plain_job(rank, set_to_none):
    module = Net()
    expected = mean_gradients(module, [batch(r) for r in range(rank.size)])
    model = brimful.DistributedDataParallel(copy.deepcopy(module))
    large = [i for i, p in enumerate(module.parameters()) if p.numel() >= WIDTH * WIDTH]
    assert sum(f"[{i}]" in model.plan for i in large) == 3  # each is a bucket of its own
    for _ in range(3):
        loss_of(model, batch(rank.index)).backward()
        close(model, expected)
        model.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_large_gradients_are_the_mean_in_a_plain_loop(ranks, set_to_none):
    ranks(plain_job, set_to_none)


def no_copy_job(rank):
    """Large gradients are all that a step leaves, once gloo's threads have let go of what they sent."""
    model = brimful.DistributedDataParallel(Net())
    before = brimful.memory.stats("cpu").used_bytes
    loss_of(model, batch(rank.index)).backward()
    bound = 2 * 4 * WIDTH * WIDTH + 64 * 1024  # two of the three large parameters have a gradient
    deadline = time.monotonic() + 5
    while brimful.memory.stats("cpu").used_bytes - before > bound and time.monotonic() < deadline:
        time.sleep(0.01)
    assert brimful.memory.stats("cpu").used_bytes - before <= bound


def test_large_gradients_have_no_second_copy(ranks):
    ranks(no_copy_job)


def address_job(rank):
    """The gradient that autograd makes, and no copy of it, is p.grad."""
    model = brimful.DistributedDataParallel(Net())
    arrived = {}

    def note(name):
        return lambda gradient: arrived.update({name: gradient.data_ptr()})

    large = {n: p for n, p in model.module.named_parameters() if p.dim() == 2 and n != "unused"}
    for name, parameter in large.items():
        parameter.register_hook(note(name))
    for _ in range(3):
        loss_of(model, batch(rank.index)).backward()
        assert arrived == {name: p.grad.data_ptr() for name, p in large.items()}
        model.zero_grad()


def test_large_gradients_stay_where_autograd_left_them(ranks):
    ranks(address_job)


def kept_job(rank):
    """A hook of the program that keeps a view of the gradient keeps this rank's values."""
    model = brimful.DistributedDataParallel(Net())
    kept = []
    model.module.second.weight.register_hook(lambda gradient: kept.append(gradient.view(-1)))
    loss_of(model, batch(rank.index)).backward()
    own = torch.autograd.grad(loss_of(model.module, batch(rank.index)), model.module.second.weight)
    assert torch.equal(kept[0], own[0].view(-1))
    assert not torch.equal(kept[0], model.module.second.weight.grad.view(-1))


def test_a_view_that_a_hook_keeps_is_not_reduced(ranks):
    ranks(kept_job)


def accumulate_job(rank):
    module = Net()
    xs = [[batch(10 * r + k) for r in range(rank.size)] for k in range(3)]
    sums = [mean_gradients(module, x) for x in xs]
    expected = {n: None if sums[0][n] is None else sum(s[n] for s in sums) for n in sums[0]}
    model = brimful.DistributedDataParallel(copy.deepcopy(module))
    for _ in range(2):
        with model.no_sync():
            loss_of(model, xs[0][rank.index]).backward()
            loss_of(model, xs[1][rank.index]).backward()
        loss_of(model, xs[2][rank.index]).backward()
        close(model, expected)
        model.zero_grad()


def test_large_gradients_accumulate_under_no_sync(ranks):
    ranks(accumulate_job)


def used_by_one_job(rank):
    module = Net()
    module.use = rank.index == 1
    reference = copy.deepcopy(module)
    reference.use = False
    a = mean_gradients(reference, [batch(0)])
    reference.use = True
    b = mean_gradients(reference, [batch(1)])
    expected = {n: ((0 if a[n] is None else a[n]) + b[n]) / 2 for n in b}
    model = brimful.DistributedDataParallel(module)
    for _ in range(3):
        loss_of(model, batch(rank.index)).backward()
        close(model, expected)
        model.zero_grad()


def test_a_large_parameter_that_one_rank_uses(ranks):
    ranks(used_by_one_job)


class Aliased(torch.nn.Module):
    """Two large parameters whose gradients autograd hands out as views of one tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x * (self.a.view(-1) + self.b.view(-1))


def aliased_job(rank):
    model = brimful.DistributedDataParallel(Aliased())
    x = torch.full((WIDTH * WIDTH,), float(rank.index + 1))
    mean = sum(r + 1 for r in range(rank.size)) / rank.size
    for _ in range(2):
        model(x).sum().backward()
        for p in model.parameters():
            assert torch.equal(p.grad, torch.full_like(p, mean))
        model.zero_grad()


def test_gradients_that_share_memory_are_distinguished(ranks):
    ranks(aliased_job)


def sizer_job(rank):
    """Uneven pieces, a rank without data, a budget that is cut in backward: always the exact mean."""
    module = Net()
    model = brimful.DistributedDataParallel(copy.deepcopy(module))
    sizer = brimful.BatchSizer(model)
    rows = [5, 2]
    xs = [batch(r, rows[r]) for r in range(2)]
    expected = mean_gradients(module, xs)
    for split in (None, [1] * rows[rank.index]):
        sizer.step(xs[rank.index], loss_of, split=split)
        expect_unused = {**expected, "unused": None}
        close(model, expect_unused)
        model.zero_grad()
    data = xs[0] if rank.index == 0 else brimful.NO_DATA
    sizer.step(data, loss_of)
    close(model, mean_gradients(module, xs[:1]))
    model.zero_grad()


def test_large_gradients_under_a_sizer(ranks):
    ranks(sizer_job)


def fault_job(rank, failing):
    """An allocation refused at every index of one rank's step: all repeat what they must, and the mean is exact."""
    model = brimful.DistributedDataParallel(Net())
    x = batch(rank.index, 4)
    brimful.BatchSizer(model).step(x, loss_of)
    expected = gradients_of(model)
    model.zero_grad()
    retried = 0
    for index in range(200):
        sizer = brimful.BatchSizer(model)
        with _C._FaultAt(index if rank.index == failing else 1 << 40) as fault:
            outcome = sizer.step(x, loss_of)
        close(model, expected)
        model.zero_grad()
        hit = [fault.fired]
        torch.distributed.broadcast_object_list(hit, failing)
        if not hit[0]:
            return index, retried
        retried += outcome.retries > 0
    raise AssertionError("the step has no end")


@pytest.mark.parametrize("failing", [0, 1])
def test_memory_runs_out_at_every_place(ranks, failing):
    for places, retried in ranks(fault_job, failing):
        assert places > 10
        assert retried > 0


def plain_fault_job(rank, failing):
    """In a plain loop both ranks raise, and the next step works."""
    model = brimful.DistributedDataParallel(Net())
    x = batch(rank.index, 4)
    loss_of(model, x).backward()
    expected = gradients_of(model)
    model.zero_grad()
    failed = 0
    for index in range(200):
        loss = loss_of(model, x)
        error = None
        try:
            with _C._FaultAt(index if rank.index == failing else 1 << 40) as fault:
                loss.backward()
        except (torch.OutOfMemoryError, brimful.RankOutOfMemory) as e:
            error = e
        assert isinstance(error, brimful.RankOutOfMemory) == (
            error is not None and rank.index != failing
        )
        model.zero_grad()
        failed += error is not None
        hit = [fault.fired]
        torch.distributed.broadcast_object_list(hit, failing)
        loss_of(model, x).backward()
        close(model, expected)
        model.zero_grad()
        if not hit[0]:
            return failed
    raise AssertionError("the step has no end")


def test_memory_runs_out_at_every_place_of_a_plain_backward(ranks):
    for failing in (0, 1):
        first, second = ranks(plain_fault_job, failing)
        assert first == second > 3


def values_job(rank, plan):
    module = Net()
    model = brimful.DistributedDataParallel(copy.deepcopy(module), plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        loss_of(model, batch(10 * rank.index + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def test_replicas_stay_bit_equal_with_any_plan(ranks):
    values = [ranks(values_job, plan) for plan in ("auto", "ordered", "registration")]
    for both in values:
        assert same_bits(both[0], both[1])
    # Two ranks: a sum has one order, so the plan does not matter.
    assert same_bits(values[0][0], values[1][0]) and same_bits(values[0][0], values[2][0])


def join_job(rank, steps):
    """Ranks without data add nothing to large gradients, however many of their steps others make."""
    module = Net()
    model = brimful.DistributedDataParallel(copy.deepcopy(module))
    with model.join():
        for step in range(steps[rank.index]):
            model.zero_grad()
            loss_of(model, batch(10 * rank.index + step)).backward()
            there = [r for r in range(rank.size) if step < steps[r]]
            expected = mean_gradients(module, [batch(10 * r + step) for r in there])
            share = len(there) / rank.size
            mine = gradients_of(model)
            for name in ("first.weight", "second.weight", "first.bias"):
                difference = relative_difference(
                    {"": mine[name]}, {"": expected[name].double() * share}
                )
                assert difference < 2e-6, (step, name, difference)


@pytest.mark.parametrize("steps", [(1, 4), (3, 1)])
def test_a_joined_rank_adds_nothing_to_large_gradients(ranks, steps):
    ranks(join_job, steps)
