"""A pipeline as a module: its parameters' names, its state, its modes, its schedules and what it is given."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from models import relative_difference
from test_pipeline import check, data, net, whole
from torch import nn

from brimful import Pipeline, Schedule, split_sequential
from brimful.pipeline import pop, stash

pytestmark = pytest.mark.usefixtures("no_limit")


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))


def same_state(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_cut_model_keeps_its_names():
    model = normed()
    pipe = Pipeline(split_sequential(model, [2, 2]))
    assert list(pipe.parameters()) == list(model.parameters())
    assert dict(pipe.named_parameters()) == dict(model.named_parameters())
    same_state(pipe.state_dict(), model.state_dict())
    other = normed()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)
    assert pipe.load_state_dict(other.state_dict()) == ([], [])
    same_state(model.state_dict(), other.state_dict())
    model.load_state_dict(pipe.state_dict())
    assert pipe.state_dict(keep_vars=True)["0.weight"] is model[0].weight
    assert pipe.eval() is pipe and not any(m.training for m in model)
    pipe.train()
    assert all(layer.training for layer in model)


def test_names_that_two_stages_have_begin_with_the_stages_number():
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), torch.compile(nn.Linear(6, 6)), normed()]
    plain = nn.Sequential(stages[0], stages[1]._orig_mod, stages[2])
    pipe = Pipeline(stages)
    same_state(pipe.state_dict(), plain.state_dict())
    pipe.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    assert [name for name, _ in pipe.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_functions_and_shared_weights_have_names_too():
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    b.weight = a.weight
    pipe = Pipeline([lambda x: b(a(x)), nn.Sequential(a)])
    assert {id(p) for p in pipe.parameters()} == {id(a.weight), id(a.bias), id(b.bias)}
    assert len(list(pipe.parameters())) == 3
    state = pipe.state_dict()
    assert len(state) == 6
    pipe.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not any(p.any() for p in [*a.parameters(), *b.parameters()])


def test_a_state_that_does_not_fit_is_named():
    model = net()
    pipe = Pipeline(split_sequential(model, [2, 2]))
    state = model.state_dict()
    del state["2.bias"]
    state["9.weight"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"missing keys: 2.bias; keys of no stage: 9.weight"):
        pipe.load_state_dict(state)
    assert pipe.load_state_dict(state, strict=False) == (["2.bias"], ["9.weight"])
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        pipe.load_state_dict({**model.state_dict(), "0.bias": torch.zeros(7)}, strict=False)
    with pytest.raises(TypeError, match=r"state must be a dict by name \(state: 3\)"):
        pipe.load_state_dict(3)


def test_an_optimizer_takes_a_pipelines_parameters():
    model, reference = net(), net()
    x, y = data()
    pipe = Pipeline(split_sequential(model, [2, 2]), loss_fn=F.mse_loss, microbatches=4)
    pairs = [(pipe, torch.optim.SGD(pipe.parameters(), 0.1))]
    pairs.append((None, torch.optim.SGD(reference.parameters(), 0.1)))
    for _ in range(3):
        for piped, optimizer in pairs:
            piped.step(x, y) if piped else F.mse_loss(reference(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[name], value)


def one(microbatches, **options):
    return Pipeline([nn.Linear(6, 6), nn.Linear(6, 6)], microbatches=microbatches, **options)


BAD = {
    "microbatches": (lambda: one(42.0), TypeError, "microbatches must be a whole number (microbatches: 42.0)"),
    "no microbatch": (lambda: one(0), ValueError, "(microbatches: 0)"),
    "too many": (lambda: one(2**70), ValueError, f"(microbatches: {2**70})"),
    "max_retries": (lambda: one(2, max_retries="8"), TypeError, "whole number (max_retries: '8')"),
    "threads": (lambda: one(2, threads_per_rank=1.5), TypeError, "(threads_per_rank: 1.5)"),
    "batch_norm": (lambda: one(2, batch_norm=None), TypeError, "string (batch_norm: None)"),
    "loss_fn": (lambda: one(2, loss_fn=3), TypeError, "must be callable (loss_fn: 3)"),
    "size_fn": (lambda: one(2, size_fn=3, split_fn=len), TypeError, "must be callable (size_fn: 3)"),
    "kwargs_dim": (lambda: one(2, kwargs_dim=1), TypeError, "a dict by name (kwargs_dim: 1)"),
    "a keyword": (lambda: one(2, kwargs_dim={1: 0}), TypeError, "(a key of kwargs_dim: 1)"),
    "tied": (lambda: one(2, tied=["w"]), TypeError, "a dict by name (tied: ['w'])"),
    "a copy": (lambda: one(2, tied={"w": 3}), TypeError, "(w: 3)"),
    "group": (lambda: one(2, group="world"), TypeError, "ProcessGroup (type: <class 'str'>)"),
    "schedule": (lambda: one(2, schedule=3), TypeError, "of a number of microbatches (schedule: 3)"),
    "no schedule": (lambda: one(2, schedule=str), TypeError, "returned none (type: <class 'str'>)"),
    "stages": (lambda: Pipeline(nn.Linear(6, 6)), TypeError, "cut the model with split_sequential"),
    "a number": (lambda: Pipeline(3), TypeError, "(stages: 3)"),
    "balance": (lambda: split_sequential(net(), 3), TypeError, "(balance: 3)"),
    "halves": (lambda: split_sequential(net(), [1.5, 2.5]), TypeError, "(balance: [1.5, 2.5])"),
    "no Sequential": (lambda: split_sequential(nn.Linear(6, 6), [1]), TypeError, "Linear"),
    "ranks": (lambda: Schedule("1f1b", 2.0, 4), TypeError, "whole number (ranks: 2.0); pass an int"),
    "many": (lambda: Schedule("1f1b", 2, 2**70), ValueError, "microbatches: 2147483647"),
    "a name": (lambda: Schedule(3, 2, 2), TypeError, "(name: 3)"),
    "what is stashed": (lambda: stash("h", 3), TypeError, "stash takes a tensor"),
    "its name": (lambda: stash(3, torch.ones(1)), TypeError, "name must be a string (name: 3)"),
    "what is popped": (lambda: pop(None), TypeError, "name must be a string (name: None)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named_with_its_value(name):
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=re.escape(text)) as error:
        call()
    assert "incompatible" not in str(error.value) and len(str(error.value)) < 300


NAMES_OF_TORCH = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B": ("interleaved_1f1b", 2),
    "LoopedBFS": ("looped_bfs", 2),
    "InterleavedZeroBubble": ("zb_h1", 2),
    "ZBVZeroBubble": ("zbv", 2),
    "DualPipeV": ("dualpipev", 2),
}


@pytest.mark.parametrize("name", NAMES_OF_TORCH)
def test_torchs_names_of_schedules_are_known(name):
    from torch.distributed.pipelining.schedules import get_schedule_class

    own, per_rank = NAMES_OF_TORCH[name]
    expected = Schedule(own, 2, 4, stages_per_rank=per_rank)
    of_class = get_schedule_class(name).__name__
    for given in (name, name.lower(), name.upper(), of_class):
        found = Schedule(given, 2, 4, stages_per_rank=per_rank)
        assert found == expected and found.name == own
    model = net(2 * per_rank)
    check(
        model,
        split_sequential(model, [2] * 2 * per_rank),
        *data(),
        schedule=name,
        devices=["cpu"] * 2,
    )


UNEVEN = """
0F0,1F0,0F1,1F1,0F2,1F2,1B0,0B0,1B1,0B1,1B2,0B2
2F0,2B0,2F1,2B1,2F2,2B2
"""


@pytest.mark.parametrize("communicates", [False, True])
def test_ranks_may_have_different_numbers_of_stages(communicates):
    schedule = Schedule.from_csv(UNEVEN)
    schedule = schedule.with_communication() if communicates else schedule
    assert schedule.check()
    model = net(3)
    pipe = check(
        model,
        split_sequential(model, [2, 3, 1]),
        *data(),
        schedule=schedule,
        devices=["cpu"] * 2,
        microbatches=3,
    )
    x, _ = data()
    torch.testing.assert_close(pipe.forward(x), model(x).detach())
    assert [line.split(":")[0] for line in repr(pipe).splitlines()[1:]] == [
        f"  stage {i} (Sequential)" for i in range(3)
    ]
    with pytest.raises(ValueError, match="is for another pipeline"):
        Pipeline(split_sequential(net(), [2, 2]), schedule=schedule, devices=["cpu"] * 2)
    with pytest.raises(ValueError, match=r"a built-in schedule \(stages: 3, devices: 2\)"):
        Pipeline(split_sequential(model, [2, 3, 1]), devices=["cpu"] * 2)


def uneven(here):
    """Three stages in two processes."""
    rank = here.index
    model = net(3)
    x, y = data()
    loss, gradients = whole(model, x, y)
    stages = split_sequential(model, [2, 3, 1])
    pipe = Pipeline(
        stages[:2] if rank == 0 else stages[2:],
        group=torch.distributed.group.WORLD,
        schedule=Schedule.from_csv(UNEVEN),
        microbatches=3,
        loss_fn=F.mse_loss,
    )
    names = [name for name, _ in pipe.named_parameters()]
    own = {name: gradients[name] for name in names}
    assert set(names) == {n for n in gradients if (int(n[0]) < 5) == (rank == 0)}
    for rows in (11, 2):
        loss, gradients = whole(model, x[:rows], y[:rows])
        outcome = pipe.step(x[:rows], y[:rows])
        assert outcome.loss == pytest.approx(loss, rel=1e-12)
        own = {name: gradients[name] for name in names if name in gradients}
        found = {name: p.grad for name, p in pipe.named_parameters()}
        assert relative_difference(found, own) < 1e-12
        model.zero_grad()
    out = pipe.forward(x)
    assert (out is None) == (rank == 0)
    missing, _ = pipe.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not missing and list(pipe.state_dict()) == [
        name for name in model.state_dict() if (int(name[0]) < 5) == (rank == 0)
    ]
    return True


def test_processes_may_have_different_numbers_of_stages(ranks):
    assert ranks(uneven) == [True, True]
