"""state_dict, copies and pickles: those of torch's class and ours are interchangeable."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from ddp_reference import (
    mean_gradients,
    require_gradients,
    small_net,
    train_once,
    wrap,
)
from models import gradients_of, same_bits, values_of
from rank_processes import raised
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import brimful


def normed_net(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    )


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def state_dict_job(rank):
    ours, theirs = wrap(normed_net(1)), DistributedDataParallel(normed_net(2))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(name.startswith("module.") for name in ours.state_dict())
    keys = theirs.load_state_dict(through_a_file(ours.state_dict()))
    assert not keys.missing_keys and not keys.unexpected_keys
    assert same_bits(values_of(theirs), values_of(normed_net(1)))
    theirs.load_state_dict(DistributedDataParallel(normed_net(3)).state_dict())
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    assert same_bits(values_of(ours), values_of(normed_net(3)))

    bare = normed_net(4)
    bare.load_state_dict(through_a_file(ours.module.state_dict()))
    assert same_bits(values_of(bare), values_of(ours))
    ours.module.load_state_dict(normed_net(5).state_dict())
    assert same_bits(values_of(ours), values_of(normed_net(5)))
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(
        state := ours.state_dict(), "module."
    )
    bare.load_state_dict(state)

    double = normed_net(5).double()
    x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank.index))
    trained = wrap(normed_net(6).double())
    trained.load_state_dict(wrap(double).state_dict())
    trained(x).square().sum().backward()  # a loaded model is still reduced
    expected = mean_gradients(
        normed_net(5).double(),
        rank.size,
        lambda module, r: (
            module(
                torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(r))
            )
            .square()
            .sum()
            .backward()
        ),
    )
    expected["0.bias"] = gradients_of(trained)["0.bias"]  # 0 but for rounding, below BatchNorm
    require_gradients(trained, expected, 1e-11)


def test_checkpoints_of_both_classes_and_of_the_bare_module_load_into_each_other(ranks):
    ranks(state_dict_job)


def optimizer_state_job(rank):
    ours, theirs = wrap(small_net()), DistributedDataParallel(small_net())
    states = []
    for model in (ours, theirs):
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(2):
            train_once(model, rank.index, step)
            optimizer.step()
            optimizer.zero_grad()
        states.append(optimizer.state_dict())
    for index, state in states[0]["state"].items():
        for key, value in state.items():
            assert torch.allclose(value, states[1]["state"][index][key], rtol=1e-10), key
            assert value.untyped_storage().nbytes() == value.nbytes  # no piece of a bucket
    return [name for name, _ in ours.named_parameters()], [n for n, _ in theirs.named_parameters()]


def test_optimizer_state_is_that_of_torchs_class(ranks):
    for ours, theirs in ranks(optimizer_state_job):
        assert ours == theirs


def torchs_checkpoint_api_job(rank):
    """torch.distributed.checkpoint drops the prefix of torch's own class, and ours through the inner module."""
    ours = get_model_state_dict(wrap(small_net()).module)
    return list(ours) == list(get_model_state_dict(DistributedDataParallel(small_net())))


def test_names_without_a_prefix_are_those_that_torchs_checkpoints_have(ranks):
    assert ranks(torchs_checkpoint_api_job, size=1) == [True]


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": pickled}


def copy_job(rank, how):
    model = wrap(small_net(), find_unused_parameters=True)
    train_once(model, rank.index)
    twin = COPIES[how](model)
    assert same_bits(values_of(twin), values_of(model))
    assert twin.parameters_to_ignore == model.parameters_to_ignore
    model.zero_grad()
    twin.zero_grad()
    expected = mean_gradients(small_net(), rank.size, train_once)
    train_once(twin, rank.index)
    require_gradients(twin, expected)
    assert all(p.grad is None for p in model.parameters())
    assert twin.reducer.plan == model.reducer.plan
    twin.zero_grad()
    train_once(model, rank.index)
    require_gradients(model, expected)
    assert all(p.grad is None for p in twin.parameters())


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_reduces_its_own_gradients(ranks, how):
    ranks(copy_job, how)


def lonely_copy_job(rank):
    """A moving average on rank 0 alone: making it and running it forward is nobody else's business."""
    model = wrap(small_net())
    if rank.index == 0:
        average = copy.deepcopy(model)
        with torch.no_grad():
            average(torch.zeros(2, 6, dtype=torch.float64))
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.5)
        average.zero_grad()
        assert average._reducer is None
    train_once(model, rank.index)
    require_gradients(model, mean_gradients(small_net(), rank.size, train_once))


def test_a_copy_on_one_rank_waits_for_nobody(ranks):
    ranks(lonely_copy_job)


def own_group_job(rank):
    group = dist.new_group(list(range(rank.size)))
    model = wrap(small_net(), process_group=group)
    assert same_bits(values_of(copy.deepcopy(model.module)), values_of(model))
    return raised(copy.deepcopy, model), raised(
        copy.deepcopy, DistributedDataParallel(small_net(), process_group=group)
    )


def test_a_model_of_a_group_of_its_own_is_not_copied_as_with_torch(ranks):
    for ours, theirs in ranks(own_group_job):
        assert type(ours) is type(theirs) is RuntimeError
        assert "copy model.module and wrap the copy" in str(ours)


def save_job(rank):
    file = io.BytesIO()
    torch.save(wrap(small_net()), file)
    return file.getvalue()


def test_a_pickle_loads_without_a_process_group_and_says_what_training_needs(ranks):
    (saved,) = ranks(save_job, size=1)
    model = torch.load(io.BytesIO(saved), weights_only=False)
    assert same_bits(values_of(model), values_of(small_net()))
    x = torch.zeros(2, 6, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(model(x), small_net()(x))
    with pytest.raises(
        ValueError, match=r"not initialised .*; call torch.distributed.init_process"
    ):
        model(x)
    assert isinstance(model, brimful.DistributedDataParallel)
