"""A step whose optimizer would run out of memory fails before it begins: no update is ever left half done."""

import pytest
import torch
from models import classes, cross_entropy, same_bits, used, values_of, wrap
from rank_processes import raised

import brimful
from brimful import _C
from brimful.sizer._next_step import next_step

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum and decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p),
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p, foreach=False),
}
MATRICES = {
    "Muon": {},
    "Muon, decay": {"weight_decay": 0.2, "nesterov": False},
}


@pytest.fixture(autouse=True)
def lifted(no_limit):
    pass


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 300), torch.nn.ReLU(), torch.nn.Linear(300, 200), torch.nn.Linear(200, 3)
    )


def fill_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_will_allocate_is_known(name):
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):  # with its state yet to be made, and with it there
        fill_gradients(model)
        before = used(), values_of(model), torch.get_rng_state()
        kept, most, _ = next_step(optimizer)
        assert same_bits(values_of(model), before[1])
        assert torch.equal(torch.get_rng_state(), before[2])
        start = used()
        with _C._PeakScope("cpu") as scope:
            optimizer.step()
        assert most <= scope.peak_bytes - start <= most + 64  # numbers that kernels wrap in tensors
        assert used() - start == kept


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("width", [32, 64, 100])
def test_the_scratch_memory_of_products_of_matrices_is_known(name, width):
    """bfloat16 products pack their factors in memory that no tensor shows."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, 96, bias=False)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-3, **MATRICES[name])
    for _ in range(2):
        fill_gradients(model)
        before = values_of(model)
        kept, most, _ = next_step(optimizer)
        assert same_bits(values_of(model), before)
        start = used()
        with _C._PeakScope("cpu") as scope:
            optimizer.step()
        taken = scope.peak_bytes - start
        assert taken <= most <= 1.02 * taken + 4096
        assert used() - start == kept


def test_the_peak_of_adafactor_is_short_by_what_its_loop_still_holds_of_earlier_parameters():
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters(), foreach=False)
    for _ in range(2):
        fill_gradients(model)
        kept, most, _ = next_step(optimizer)
        start = used()
        with _C._PeakScope("cpu") as scope:
            optimizer.step()
        assert used() - start == kept
        assert most <= scope.peak_bytes - start <= 1.01 * most


def test_the_state_of_sparse_adam_is_known_before_there_is_a_gradient():
    table = torch.nn.Embedding(50, 20, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    kept, _, states = next_step(optimizer)
    assert kept == 2 * 50 * 20 * 4
    assert [parameter is table.weight for parameter, _ in states] == [True]
    table(torch.tensor([1, 2])).sum().backward()
    start = used()
    optimizer.step()
    assert used() - start == kept
    assert next_step(optimizer)[0] == 0


def test_looking_ahead_leaves_optimizer_and_hooks_alone():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    next_step(optimizer)
    assert calls == [] and len(optimizer.state) == 0
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_an_optimizer_that_needs_more_than_gradients_is_not_judged():
    model = net()
    assert next_step(torch.optim.LBFGS(model.parameters())) == (0, 0, [])
    sizer = brimful.BatchSizer(model, torch.optim.LBFGS(model.parameters()), predict=False)
    brimful.memory.set_limit("cpu", used() + 50_000_000)
    assert sizer.step(classes(20), cross_entropy).retries == 0


def least_room(name, steps):
    """The least room for which `steps` steps and updates go well; fails if the optimizer ever runs out."""

    def goes_well(room):
        model = net()
        optimizer = OPTIMIZERS[name](model.parameters())
        sizer = brimful.BatchSizer(model, optimizer, predict=False)
        batch = classes(4)
        before = values_of(model)
        brimful.memory.set_limit("cpu", used() + room)
        try:
            for step in range(steps):
                error = raised(sizer.step, batch, cross_entropy)
                if error is not None:
                    assert isinstance(error, (brimful.BatchTooLarge, ValueError))
                    assert all(p.grad is None for p in model.parameters())
                    brimful.memory.set_limit("cpu", None)
                    return False, error, step > 0 or same_bits(values_of(model), before)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            brimful.memory.set_limit("cpu", None)
        return True, None, False

    goes_well(50_000_000)
    low, high = 0, 50_000_000
    while high - low > 1:
        middle = (low + high) // 2
        good, error, unchanged = goes_well(middle)
        if good:
            high = middle
        else:
            low = middle
            assert unchanged
    return high, error if not good else goes_well(low)[1]


@pytest.mark.parametrize("name", ["Adam", "Adam, foreach", "SGD"])
def test_no_budget_reaches_the_optimizer_and_none_that_is_enough_is_refused(name):
    room, error = least_room(name, 2)
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    fill_gradients(model)
    gradients = sum(p.numel() * 4 for p in model.parameters())
    needed = gradients + next_step(optimizer).peak_bytes
    assert needed <= room <= needed + 16384  # the generator's state, and a step of a few rows
    if name != "SGD":
        assert type(error) is brimful.BatchTooLarge
        assert "the optimizer's step would run out of memory" in str(error)


def short_rank_job(rank):
    model = wrap(net())
    optimizer = torch.optim.Adam(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer, predict=False)
    before = values_of(model)
    if rank.index == 1:  # room for the optimizer's state, none for what it takes beside
        state = 2 * sum(4 * p.numel() for p in model.parameters())
        brimful.memory.set_limit("cpu", used() + state + 2000)
    error = raised(sizer.step, classes(8, seed=rank.index), cross_entropy)
    brimful.memory.set_limit("cpu", None)
    assert same_bits(values_of(model), before)
    outcome = sizer.step(classes(8, seed=rank.index), cross_entropy)
    optimizer.step()
    return error, outcome.retries


def test_all_ranks_learn_that_the_optimizer_of_one_would_run_out(ranks):
    (healthy, _), (short, _) = ranks(short_rank_job)
    assert type(short) is brimful.BatchTooLarge, short
    assert type(healthy) is brimful.RankOutOfMemory and healthy.rank == 1, healthy
    assert "the optimizer's step would run out of memory" in str(healthy)
