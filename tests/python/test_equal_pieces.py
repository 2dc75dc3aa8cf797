"""A compiled model meets pieces of one size: it compiles for each size that it meets."""

import pytest
import torch
import torch._dynamo
from models import classes, cross_entropy
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
def test_a_compiled_model_gets_pieces_of_one_size_and_compiles_once(make):
    torch._dynamo.reset()
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
def test_equal_pieces_may_be_asked_for_or_left(make, equal, expected):
    torch._dynamo.reset()
    sizer = brimful.BatchSizer(make(net()), pieces=7, predict=False, equal_pieces=equal)
    assert sizer.step(classes(120), cross_entropy).split == expected


def test_rows_that_no_number_near_divides_are_split_as_ever():
    sizer = brimful.BatchSizer(compiled(net()), pieces=7, predict=False)
    assert sizer.step(classes(121), cross_entropy).split == [18, 18] + [17] * 5
