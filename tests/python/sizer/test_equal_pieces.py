"""A compiled model meets pieces of one size: it compiles for each size that it meets."""

import random

import pytest
import torch
import torch._dynamo
from models import classes, cross_entropy, used
from torch._dynamo.utils import counters

import brimful


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def compiled(module):
    return torch.compile(module, backend="eager", dynamic=False)


def compiled_in_place(module):
    module.compile(backend="eager", dynamic=False)
    return module


def compiled_by_block(module):
    module[0].compile(backend="eager", dynamic=False)
    return module


@pytest.mark.parametrize("make", [compiled, compiled_in_place, compiled_by_block])
def test_a_compiled_model_gets_pieces_of_one_size_and_compiles_once(make, fresh_compiler):
    counters.clear()
    model = make(net())
    sizer = brimful.BatchSizer(model, pieces=7, predict=False)
    for step in range(3):
        assert sizer.step(classes(120, seed=step), cross_entropy).split == [15] * 8
        model.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("make", "equal", "expected"),
    [
        (lambda module: module, None, [18] + [17] * 6),
        (lambda module: module, True, [15] * 8),
        (compiled, False, [18] + [17] * 6),
    ],
)
def test_equal_pieces_may_be_asked_for_or_left(make, equal, expected, fresh_compiler):
    sizer = brimful.BatchSizer(make(net()), pieces=7, predict=False, equal_pieces=equal)
    assert sizer.step(classes(120), cross_entropy).split == expected


def test_rows_that_no_number_near_divides_are_split_into_common_sizes():
    sizer = brimful.BatchSizer(compiled(net()), pieces=7, predict=False)
    assert sizer.step(classes(121), cross_entropy).split == [16] * 7 + [6, 3]


@pytest.mark.parametrize("predict", [False, True])
def test_batches_and_limits_that_change_meet_few_sizes(predict, no_limit, fresh_compiler):
    counters.clear()
    model = compiled(
        torch.nn.Sequential(torch.nn.Linear(6, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3))
    )
    sizer = brimful.BatchSizer(model, predict=predict)
    rows = random.Random(0)
    split, whole = set(), set()
    for step in range(100):
        batch = classes(rows.randint(65, 128), seed=step)
        if step % 25 == 0:  # pieces grow again
            room = (60_000, 100_000, 160_000, 240_000)[step // 25]
            brimful.memory.set_limit("cpu", used() + room)
        outcome = sizer.step(batch, cross_entropy)
        model.zero_grad()
        (split if outcome.pieces > 1 else whole).update(outcome.split)
    assert len(split) <= 14, sorted(split)
    assert max(split) >= 32 > min(split)
