"""A model that changes after it was wrapped: named there, reported elsewhere, never in a collective."""

import itertools

import pytest
import torch
from models import classes, cross_entropy, gradients_of, same_bits
from rank_processes import raised

import brimful

SOON_S = 2.0


def net():
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
    )


def replaced(module):
    module[2].weight = torch.nn.Parameter(module[2].weight.detach().clone())


def added(module):
    module[0].register_parameter("extra", torch.nn.Parameter(torch.ones(3)))


def added_layer(module):
    module.append(torch.nn.Linear(3, 3))


def unfrozen(module):
    module[3].bias.requires_grad_(True)


def loaded(module):
    module.load_state_dict({n: v.clone() for n, v in module.state_dict().items()}, assign=True)


def other_dtype(module):
    module.double()


def narrower(module):  # the strides of what was wrapped, and less memory behind them
    module[2].weight.data = module[2].weight.data[:5].clone()
    module[2].bias.data = module[2].bias.data[:5].clone()
    module[3].weight.data = module[3].weight.data[:, :5].clone()


def wider(module):
    module[2].weight.data = torch.cat([module[2].weight.data] * 2)
    module[2].bias.data = torch.cat([module[2].bias.data] * 2)
    module[3].weight.data = torch.cat([module[3].weight.data] * 2, 1)


def one_row(module):  # of a shape that a copy would broadcast
    module[3].weight.data = module[3].weight.data[:1].clone()
    module[3].bias.data = torch.zeros(1)


# Change: what the message says of it, and how the name of the parameter begins; None: the words are autograd's own
CHANGES = {
    replaced: ("was replaced", "2.weight"),
    added: ("was added or unfrozen", "0.extra"),
    added_layer: ("was added or unfrozen", "4.weight"),
    unfrozen: ("was added or unfrozen", "3.bias"),
    loaded: ("was replaced", "0.weight"),
    other_dtype: ("wrapped with ", ""),
    narrower: None,
    wider: None,
    one_row: None,
}


def loss(model, piece):
    x, y = piece
    dtype = next(model.parameters()).dtype
    return cross_entropy(model, (x.to(dtype), y % model.module[3].weight.shape[0]))


def changed_job(rank, way, places):
    for change, place in itertools.product(CHANGES, places):
        module = net()
        module[3].bias.requires_grad_(change is not unfrozen)
        model = brimful.DistributedDataParallel(module, bucket_cap_mb=0.0001)
        sizer = brimful.BatchSizer(model)
        about = change.__name__, place, rank.index

        def step(model=model, sizer=sizer):
            batch = classes(8, seed=rank.index)
            if way == "sizer":
                sizer.step(batch, loss)
            elif way == "scope":
                with model.step():
                    loss(model, batch).backward()
            else:
                loss(model, batch).backward()

        step()
        model.zero_grad()
        if rank.index in place:
            change(module)
        error = raised(step)
        model.zero_grad()
        if rank.index not in place:
            assert type(error) is brimful.RankFailed, (about, error)
            assert error.rank == place[0] and error.seconds < SOON_S, (about, error)
        if CHANGES[change] is None:
            assert isinstance(error, RuntimeError), (about, error)
            continue
        what, parameter = CHANGES[change]
        assert what in str(error) and f"(parameter: {parameter}" in str(error), (about, error)
        assert "wrap the module again" in str(error), (about, error)
        if rank.index in place:
            # torch's engine makes a ValueError of a PlanMismatch that is thrown inside backward
            inside = what.startswith("wrapped with")
            assert isinstance(error, ValueError if inside else brimful.PlanMismatch), (about, error)


@pytest.mark.parametrize("way", ["sizer", "scope", "plain"])
def test_a_model_that_changed_fails_the_step_on_all_ranks(ranks, way):
    ranks(changed_job, way, [(0,), (1,), (0, 1)], watchdog_s=60)


def frozen_job(rank, with_sizer):
    """A frozen parameter is an unused one: on all ranks its gradient stays None, on one it is the others' mean."""
    model = brimful.DistributedDataParallel(net(), bucket_cap_mb=0.0001)
    sizer = brimful.BatchSizer(model)
    found = []
    for frozen in [(), (0, 1), (1,), ()]:
        model.module[2].weight.requires_grad_(rank.index not in frozen)
        batch = classes(8, seed=rank.index)
        if with_sizer:
            sizer.step(batch, cross_entropy)
        else:
            cross_entropy(model, batch).backward()
        found.append(gradients_of(model))
        model.zero_grad()
    return found


@pytest.mark.parametrize("with_sizer", [True, False])
def test_a_frozen_parameter_is_an_unused_one(ranks, with_sizer):
    first, second = ranks(frozen_job, with_sizer)
    for mine, theirs in zip(first, second, strict=True):
        assert same_bits(mine, theirs)
    whole, none, half, again = first
    assert same_bits(whole, again)
    assert none["2.weight"] is None and none["0.weight"] is not None
    assert half["2.weight"].abs().sum() > 0 and not torch.equal(half["2.weight"], whole["2.weight"])


def rebuilt_job(rank):
    """Modules made elsewhere, and equal parameters, are no change."""
    model = brimful.DistributedDataParallel(net())
    for step in range(3):
        torch.nn.Linear(4, 4)
        model.module[0].weight = model.module[0].weight
        cross_entropy(model, classes(8, seed=step)).backward()
        model.zero_grad()


def test_modules_made_elsewhere_are_no_change(ranks):
    ranks(rebuilt_job)
