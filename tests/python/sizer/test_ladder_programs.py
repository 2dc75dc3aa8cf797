"""What programs do beside plain forwards, on the ladder's rungs: the bits stay those of the plain step."""

import functools

import pytest
import torch
from test_ladder import Twice, assert_same, clear, room, square, state_of, unlimited
from torch import nn
from torch.utils.checkpoint import checkpoint

import brimful
from brimful import _C

pytestmark = pytest.mark.usefixtures("no_limit")


def perceptron():
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 32))


class Checkpointing(nn.Module):
    """A part of it is the program's own checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = perceptron(), perceptron(), reentrant

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=self.reentrant) + x


class Kept(torch.autograd.Function):
    """Keeps its tensors past the hooks for saved tensors."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = x, weight
        return torch.tanh(x) @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.kept
        t = torch.tanh(x)
        return (gradient @ weight.t()) * (1 - t * t), (
            t.flatten(0, -2).t() @ gradient.flatten(0, -2)
        )


class Saved(Kept):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.tanh(x) @ weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.kept = ctx.saved_tensors
        return Kept.backward(ctx, gradient)


class Own(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.before, self.weight = perceptron(), nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        return self.function.apply(self.before(x), self.weight)


class Silent(nn.Module):
    """Has a part without gradients, and one that may not have any."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = perceptron(), perceptron()

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        with torch.inference_mode():
            scale = float(self.teacher(x).abs().mean())
        return (self.student(x) - wanted) * scale


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = perceptron()

    def forward(self, x, *, shift):
        y = self.inner(x)
        return {"both": (y + shift, [y * 2]), "shape": tuple(y.shape), "none": None}


class Structured(nn.Module):
    """Modules that return structures, and take some by name."""

    def __init__(self):
        super().__init__()
        self.pair = Pair()
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        found = self.pair(x, shift=x.mean())
        assert found["shape"] == tuple(x.shape) and found["none"] is None
        return self.out(found["both"][0] * found["both"][1][0])


PROGRAMS = {
    "checkpoint": lambda: Checkpointing(False),
    "checkpoint, reentrant": lambda: Checkpointing(True),
    "function, tensors as attributes": lambda: Own(Kept),
    "function, tensors saved": lambda: Own(Saved),
    "no_grad": Silent,
    "twice, tied": lambda: Twice(perceptron()),
    "structures": Structured,
}
MODULES = {
    "checkpoint": ["first", "second"],
    "checkpoint, reentrant": ["first", "second"],
    "function, tensors as attributes": ["before"],
    "function, tensors saved": ["before"],
    "no_grad": ["teacher", "student"],
    "twice, tied": ["body", "tied"],
    "structures": ["pair", "out"],
}


def rungs_for(name):
    yield _C.StepRungs(recomputed=[""])
    yield _C.StepRungs(recomputed=MODULES[name])
    yield _C.StepRungs(offloaded=[""])
    yield _C.StepRungs(recomputed=MODULES[name][:1], offloaded=MODULES[name][1:])
    yield _C.StepRungs(everything=True)


def steps(make, batch, loss_fn, rungs=None):
    torch.manual_seed(0)
    model = make()
    sizer = brimful.BatchSizer(model, ladder="auto")
    torch.manual_seed(1)
    for _ in range(3):
        clear(model)
        outcome = sizer.step(batch, loss_fn, split=[1] * len(batch), rungs=rungs)
    return state_of(model), outcome, sizer, model


@functools.cache
def plain(name):
    """A batch, and what the plain step of the program leaves, the same for each rung."""
    batch = torch.randn(2, 16, 32)
    return batch, steps(PROGRAMS[name], batch, square)[0]


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_rung_has_the_bits_of_the_plain_step(name, place):
    batch, expected = plain(name)
    rungs = list(rungs_for(name))[place]
    found, outcome, *_ = steps(PROGRAMS[name], batch, square, rungs)
    assert_same(found, expected)
    assert outcome.rungs == rungs and outcome.retries == 0


def assert_trains_without_room(make, loss_fn):
    """Three steps whose rows do not fit, beside three that have room."""
    batch = torch.randn(2, 256, 32)
    peak, expected = unlimited(make, batch, loss_fn)[1:]
    torch.manual_seed(0)
    model = make()
    sizer = brimful.BatchSizer(model, pieces=2, ladder="auto")
    torch.manual_seed(1)
    with room(int(0.8 * peak)):
        for _ in range(3):
            clear(model)
            outcome = sizer.step(batch, loss_fn)
    assert outcome.rungs
    assert_same(state_of(model), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_row_that_does_not_fit_trains(name):
    assert_trains_without_room(PROGRAMS[name], square)


def penalty(model, x):
    """Of the gradient's norm: backward goes through a backward."""
    x = x.detach().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.mean() + slope.square().mean()


def stack():
    return nn.Sequential(perceptron(), perceptron(), nn.Linear(32, 1))


@pytest.mark.parametrize(
    "rungs",
    [
        _C.StepRungs(recomputed=["0", "1"]),
        _C.StepRungs(recomputed=[""]),
        _C.StepRungs(recomputed=["0"], offloaded=["1", "2"]),
        _C.StepRungs(everything=True),
    ],
    ids=str,
)
def test_a_backward_through_a_backward(rungs):
    batch = torch.randn(2, 16, 32)
    expected = steps(stack, batch, penalty)[0]
    found, outcome, *_ = steps(stack, batch, penalty, rungs)
    assert_same(found, expected)
    assert outcome.rungs == rungs


def test_a_penalty_of_gradients_whose_row_does_not_fit_trains():
    assert_trains_without_room(stack, penalty)


def test_hooks_of_the_program_run_once_on_each_rung():
    batch = torch.randn(2, 16, 32)
    expected = steps(stack, batch, square)[0]

    def hooked():
        model = stack()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, n=name: calls.append(("pre", n)))
            module.register_forward_hook(lambda *_, n=name: calls.append(("behind", n)))
            module.register_full_backward_hook(lambda *_, n=name: calls.append(("backward", n)))
        return model

    plain = []
    for rungs in (
        None,
        _C.StepRungs(recomputed=["0", "2"]),
        _C.StepRungs(offloaded=["0", "1"]),
        _C.StepRungs(everything=True),
    ):
        calls = []
        found, *_ = steps(hooked, batch, square, rungs)
        assert_same(found, expected)
        plain = plain or sorted(calls)
        assert sorted(calls) == plain
