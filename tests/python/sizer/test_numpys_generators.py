"""Whichever bit generator NumPy's global functions have, a repeated unit of work draws the same numbers again."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brimful

GENERATORS = [numpy.random.MT19937, numpy.random.PCG64, numpy.random.Philox]


@pytest.fixture(params=GENERATORS, ids=lambda kind: kind.__name__)
def generator(request):
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(request.param(7))
    yield
    numpy.random.set_bit_generator(before)


class Drawing(nn.Module):
    """Adds numbers of Python and NumPy; its first calls run out of memory after they have drawn."""

    def __init__(self, fails):
        super().__init__()
        self.linear, self.fails, self.drawn = nn.Linear(3, 3), fails, []

    def forward(self, x):
        numbers = random.random(), numpy.random.random()
        if self.fails > 0:
            self.fails -= 1
            raise torch.OutOfMemoryError("planted")
        self.drawn.append(numbers)
        return self.linear(x) + sum(numbers)


def stepped(model, x):
    sizer = brimful.BatchSizer(model, pieces=1, max_retries=8)
    sizer.step(x, lambda m, piece: F.mse_loss(m(piece), piece))


def piped(model, x):
    pipe = brimful.Pipeline([model], loss_fn=F.mse_loss, microbatches=1)
    pipe.step(x, x)


def recomputed(model, x):
    pipe = brimful.Pipeline([model], loss_fn=F.mse_loss, microbatches=1, recompute="all")
    pipe.step(x, x)


def mapped(model, x):
    brimful.map_batches(model, x)


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("work", [stepped, piped, recomputed, mapped], ids=lambda f: f.__name__)
def test_a_repeated_unit_of_work_draws_the_same_again(work):
    drawn = []
    for fails in (0, 1):
        random.seed(1)
        model = Drawing(fails)
        before = numpy.random.get_state(legacy=False)
        work(model, torch.ones(4, 3))
        numpy.random.set_state(before)
        drawn.append(model.drawn[0])
    assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("generator")
def test_a_model_that_draws_is_reported():
    model = Drawing(0)
    check = brimful.verify_split(model, torch.ones(4, 3), lambda m, x: F.mse_loss(m(x), x))
    assert "random" in str(check)
