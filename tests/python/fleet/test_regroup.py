"""The parts of a new group: a wrapper that goes on in place, a sizer, a sampler, and what refuses."""

import pytest
import torch
from torch import nn

import brimful
from brimful import _C


def wrapped():
    torch.manual_seed(0)
    return brimful.DistributedDataParallel(
        nn.Linear(3, 2), process_group=_C._group_of_one(), bucket_cap_mb=1
    )


def loss_of(model, batch):
    return model(batch).square().mean()


def test_a_sizer_and_a_wrapper_go_on_with_another_group():
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    batch = torch.randn(4, 3)
    for turn in range(3):
        sizer.step(batch, loss_of)
        assert model.reducer.counters.steps == turn + 1
        before = [p.grad.clone() for p in model.parameters()]
        agreed = model.regroup(_C._group_of_one(), progress=turn)
        sizer.regrouped()
        assert (agreed.source, agreed.progress) == (0, [turn])
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, batch).backward()  # a plain loop, by the new hooks
    assert all(p.grad is not None for p in model.parameters())


def test_the_learned_plan_is_kept_and_an_earlier_one_learned_again():
    model = wrapped()
    sizer = brimful.BatchSizer(model)
    for _ in range(70):
        sizer.step(torch.randn(4, 3), loss_of)
        model.zero_grad()
    plan = model.plan
    model.regroup(_C._group_of_one())
    assert model.plan == plan


def test_a_rank_that_broke_off_a_step_is_no_source():
    agreed = wrapped().regroup(_C._group_of_one(), progress=3, whole=False)
    assert agreed.source == -1 and list(agreed.whole) == [0]


def test_a_communication_hook_is_refused_since_it_may_hold_the_old_group():
    model = wrapped()
    model.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    with pytest.raises(ValueError, match=r"communication hook: set.*wire_dtype"):
        model.regroup(_C._group_of_one())


def wrapped_by_torch(_):
    sizer = brimful.BatchSizer(torch.nn.parallel.DistributedDataParallel(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"keeps its process group.*brimful.DistributedData"):
        sizer.regrouped()


def test_torchs_own_class_keeps_its_group(ranks):
    ranks(wrapped_by_torch, size=1)


def test_options_of_members_that_contradict_each_other():
    store = torch.distributed.HashStore()
    with pytest.raises(ValueError, match=r"three times it.*dead_after_ms: 100"):
        brimful.Members(store, world_size=1, dead_after_ms=100)
    with pytest.raises(ValueError, match="world_size: 0"):
        brimful.Members(store, world_size=0)


def test_members_of_one_process_form_groups_one_after_the_other():
    members = brimful.Members(torch.distributed.HashStore(), "mine", world_size=1)
    first, second = members.enter("a model"), members.enter("a model")
    assert (first.epoch, second.epoch) == (1, 2)
    assert (second.rank, second.world_size, second.names) == (0, 1, ["mine"])
    members.leave()


def test_a_first_group_for_which_a_rank_is_missing_ends_with_its_number():
    members = brimful.Members(torch.distributed.HashStore(), world_size=2, patience_ms=300)
    with pytest.raises(RuntimeError, match="processes that came: 1, world_size: 2"):
        members.enter("a model")


def test_a_fleet_of_one_trains_and_a_second_call_of_the_sizer_is_refused():
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(10, 3))
    members = brimful.Members(torch.distributed.HashStore(), world_size=1)
    fleet = brimful.Fleet(members, net, optimizer, data, batch_size=4, seed=1)
    rows = []

    def step(batch):
        rows.append(len(batch[0]))
        outcome = fleet.sizer.step(batch, lambda model, piece: loss_of(model, piece[0]))
        optimizer.step()
        optimizer.zero_grad()
        return outcome.weight

    assert list(fleet.steps(step, epochs=1)) == [4, 4, 2] == rows
    assert fleet.state_dict()["progress"] == fleet.progress == 3

    members = brimful.Members(torch.distributed.HashStore(), world_size=1)
    fleet = brimful.Fleet(members, net, optimizer, data, batch_size=4, seed=1)

    def twice(batch):
        for _ in range(2):
            fleet.sizer.step(batch, lambda model, piece: loss_of(model, piece[0]))
            fleet.model.zero_grad()

    with pytest.raises(RuntimeError, match=r"must call sizer.step once \(calls: 2\)"):
        next(fleet.steps(twice, epochs=1))


def test_a_fleet_whose_data_has_no_whole_batch_is_refused():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(10, 3))
    members = brimful.Members(torch.distributed.HashStore(), world_size=1)
    fleet = brimful.Fleet(members, net, optimizer, data, batch_size=96, drop_last=True)
    with pytest.raises(ValueError, match=r"no whole batch \(rows: 10, batch_size: 96\); pass"):
        next(fleet.steps(lambda _: None, epochs=1))


def test_a_sampler_loads_batches_by_itself():
    data = torch.utils.data.TensorDataset(torch.arange(5), torch.arange(5) * 2)
    sampler = brimful.GlobalSampler(data, batch_size=2, rank=0, world_size=1)
    first, second = sampler.load([3, 1])
    assert first.tolist() == [3, 1] and second.tolist() == [6, 2]
    summed = brimful.GlobalSampler(data, batch_size=2, rank=0, world_size=1, collate_fn=len)
    assert summed.load([3, 1]) == 2
    with pytest.raises(ValueError, match="pass the data set"):
        brimful.GlobalSampler(5, batch_size=2, rank=0, world_size=1).load([1])
