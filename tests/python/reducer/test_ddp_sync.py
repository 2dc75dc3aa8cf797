"""Whether a backward synchronises is decided when it runs, in any order of forwards and backwards."""

import pytest
import torch
import torch.nn.functional as F
from ddp_reference import (
    batch_of,
    mean_gradients,
    require_gradients,
    require_same_everywhere,
    small_net,
    train_once,
    wrap,
)
from torch.nn.parallel import DistributedDataParallel


def loss_of(model, rank, step):
    x, y = batch_of(rank, step)
    return F.cross_entropy(model(x), y)


def all_losses(count):
    """Trains on `count` losses of a rank without any wrapper."""

    def train(module, rank):
        for step in range(count):
            loss_of(module, rank, step).backward()

    return train


def forward_under(model, rank):
    """The forward alone is under no_sync: its backward synchronises."""
    with model.no_sync():
        loss = loss_of(model, rank, 0)
    loss.backward()
    return [True]


def backward_under(model, rank):
    """The backward alone is under no_sync: it accumulates (accelerate #1726)."""
    loss = loss_of(model, rank, 0)
    with model.no_sync():
        loss.backward()
    launches = model.reducer.counters.launches
    loss_of(model, rank, 1).backward()
    return [launches == 0]


def forwards_then_backwards(model, rank):
    """Several forwards, then several backwards, of which the last synchronises (accelerate #1726)."""
    losses = [loss_of(model, rank, step) for step in range(3)]
    with model.no_sync():
        for loss in losses[:-1]:
            loss.backward()
    launches = model.reducer.counters.launches
    losses[-1].backward()
    return [launches == 0]


def one_forward_one_backward(model, rank):
    """Stage 0 of four in 1F1B over eight microbatches: F0 F1 F2 F3 B0 F4 B1 .. F7 B4 B5 B6 B7 (torchrec #4758)."""
    waiting = []
    launches = []
    for step in range(8 + 3):
        if step < 8:
            waiting.append(loss_of(model, rank, step))
        if step >= 3:
            loss = waiting.pop(0)
            if step == 8 + 2:
                loss.backward()
            else:
                with model.no_sync():
                    loss.backward()
                launches.append(model.reducer.counters.launches)
    return [set(launches) == {0}]


def every_backward(model, rank):
    """Two backwards that both synchronise, without zero_grad between."""
    first, second = loss_of(model, rank, 0), loss_of(model, rank, 1)
    first.backward()
    second.backward()
    return [model.reducer.counters.steps == 2]


def same_graph_twice(model, rank):
    loss = loss_of(model, rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    return [True]


def first_of_two(model, rank):
    """The first synchronises, the second only accumulates on top: ranks differ, as they asked for."""
    losses = [loss_of(model, rank, step) for step in range(2)]
    losses[0].backward()
    with model.no_sync():
        losses[1].backward()
    losses[0] = loss_of(model, rank, 2)
    losses[0].backward()
    return [True]


def twice_the_first(module, rank):
    for _ in range(2):
        loss_of(module, rank, 0).backward()


ORDERS = [
    (forward_under, all_losses(1)),
    (backward_under, all_losses(2)),
    (forwards_then_backwards, all_losses(3)),
    (one_forward_one_backward, all_losses(8)),
    (every_backward, all_losses(2)),
    (same_graph_twice, twice_the_first),
    (first_of_two, all_losses(3)),
]


def order_job(rank, index):
    run, alone = ORDERS[index]
    model = wrap(small_net())
    held = run(model, rank.index)
    assert all(held)
    require_gradients(model, mean_gradients(small_net(), rank.size, alone))
    require_same_everywhere(rank, {n: p.grad for n, p in model.named_parameters()})
    model.zero_grad()
    train_once(model, rank.index)  # nothing is left behind
    require_gradients(model, mean_gradients(small_net(), rank.size, train_once))


@pytest.mark.parametrize("index", range(len(ORDERS)), ids=[run.__name__ for run, _ in ORDERS])
def test_backwards_synchronise_as_they_were_asked(ranks, index):
    ranks(order_job, index)


def torch_job(rank):
    """Torch's class under the schedule of torchrec #4758, with the last forward outside no_sync."""
    model = DistributedDataParallel(small_net())
    losses = []
    for step in range(8 + 3):
        if step < 7:
            with model.no_sync():
                losses.append(loss_of(model, rank.index, step))
        elif step == 7:
            losses.append(loss_of(model, rank.index, step))
        if step >= 3:
            losses[step - 3].backward()
    return [p.grad for p in model.parameters()]


def test_the_schedule_is_one_that_torchs_class_gets_wrong(ranks):
    first, second = ranks(torch_job)
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def nested_job(rank):
    model = wrap(small_net())
    with model.no_sync():
        with model.no_sync():
            loss_of(model, rank.index, 0).backward()
        loss_of(model, rank.index, 1).backward()
        assert model.reducer.counters.launches == 0
    try:
        with model.no_sync():
            raise ValueError("inside")
    except ValueError:
        pass
    loss_of(model, rank.index, 2).backward()
    require_gradients(model, mean_gradients(small_net(), rank.size, all_losses(3)))


def test_no_sync_nests_and_ends_with_an_error(ranks):
    ranks(nested_job)
