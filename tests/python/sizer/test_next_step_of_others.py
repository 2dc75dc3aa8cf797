"""What an optimizer that is not torch's will allocate is measured on stand-ins, which is all that it may touch."""

import logging

import pytest
import torch
import torch.distributed as dist
from models import classes, cross_entropy, same_bits, used, values_of

import brimful
from brimful import _C
from brimful.sizer._next_step import next_step


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 300), torch.nn.ReLU(), torch.nn.Linear(300, 200), torch.nn.Linear(200, 3)
    )


def fill_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


class Optimizer(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.log = []

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.log.append(len(self.log))
        for parameter in self.parameters():
            self.update(parameter, self.state[parameter])

    def update(self, parameter, state):
        raise NotImplementedError


class Signs(Optimizer):
    """One moment, made when it is first needed."""

    def update(self, parameter, state):
        if "moment" not in state:
            state["moment"] = torch.zeros_like(parameter)
        direction = state["moment"].lerp(parameter.grad, 0.1).sign_()
        parameter.add_(direction, alpha=-0.1)
        state["moment"].lerp_(parameter.grad, 0.01)


class ReadsValues(Signs):
    def update(self, parameter, state):
        if parameter.grad.norm().item() < 1e9:
            super().update(parameter, state)
        state["double"] = torch.zeros(parameter.shape, dtype=torch.float64)


class TensorInGroup(Signs):
    """A step size of all parameters, adapted in place."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["d"] = torch.ones(())
        self.total = torch.zeros(3)

    def update(self, parameter, state):
        super().update(parameter, state)
        self.param_groups[0]["d"].add_(parameter.grad.sum())
        self.total += 1


class Draws(Signs):
    def update(self, parameter, state):
        super().update(parameter, state)
        parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Products(Signs):
    def update(self, parameter, state):
        if parameter.dim() == 2:
            state.setdefault("factor", torch.eye(len(parameter)))
            state["factor"].lerp_(parameter.grad @ parameter.grad.T, 0.1)
        super().update(parameter, state)


class Lists(Optimizer):
    """All parameters at once."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.parameters()
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["moment"] = torch.zeros_like(parameter)
        moments = [self.state[p]["moment"] for p in parameters]
        torch._foreach_add_(moments, [p.grad for p in parameters])
        torch._foreach_add_(parameters, torch._foreach_mul(moments, 0.1), alpha=-1)


KINDS = [Signs, ReadsValues, TensorInGroup, Draws, Products, Lists]


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_will_allocate_is_known(kind):
    model = net()
    optimizer = kind(model.parameters())
    for number in range(2):  # with its state yet to be made, and with it there
        fill_gradients(model)
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        before = None
        before = values_of(model), torch.get_rng_state(), repr(group), used()
        kept, most, _ = next_step(optimizer)
        assert used() == before[3] and same_bits(values_of(model), before[0])
        assert torch.equal(torch.get_rng_state(), before[1])
        assert len(optimizer.state) == number * 6 and optimizer.log == list(range(number)) * (
            kind is not Lists
        )
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        assert repr(group) == before[2]
        start = used()
        with _C._PeakScope("cpu") as scope:
            optimizer.step()
        taken = scope.peak_bytes - start
        replaced = (
            8 * 6 * 300 * 200 if kind is ReadsValues and number else 0
        )  # its state, made anew
        assert taken - 4096 <= most <= 1.02 * taken + 4096 + replaced
        assert used() - start <= kept <= used() - start + replaced


class Communicates(Signs):
    def update(self, parameter, state):
        dist.all_reduce(parameter.grad)
        super().update(parameter, state)


class WritesElsewhere(Signs):
    def __init__(self, params):
        super().__init__(params)
        self.table = torch.zeros(1 << 19)

    def update(self, parameter, state):
        self.table.add_(1)


class Within(Optimizer):
    def __init__(self, params):
        params = list(params)
        super().__init__(params)
        self.inner = Signs(params)

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Communicates, "it communicates"),
        (WritesElsewhere, "writes to tensors that are not its parameters'"),
        (Within, "an optimizer within it"),
        (Optimizer, "not known before its first step"),
    ],
)
def test_a_step_that_touches_more_is_not_known_and_leaves_no_trace(kind, why, group, caplog):
    model = net()
    optimizer = kind(model.parameters())
    fill_gradients(model)
    before = values_of(model)
    with caplog.at_level(logging.INFO, "brimful"):
        assert next_step(optimizer) == (0, 0, [])
    assert why in caplog.text.replace("its step communicates", "it communicates")
    assert same_bits(values_of(model), before) and optimizer.log == [] and not optimizer.state
    assert not getattr(optimizer, "table", torch.zeros(1)).any()


def test_a_step_that_its_state_does_not_fit_into_fails_before_the_update(no_limit):
    model = net()
    optimizer = Signs(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer, predict=False)
    before = values_of(model)
    gradients = sum(p.nbytes for p in model.parameters())
    brimful.memory.set_limit("cpu", used() + gradients + gradients // 2)
    with pytest.raises(brimful.BatchTooLarge, match="the optimizer's step would run out of memory"):
        sizer.step(classes(4), cross_entropy)
    brimful.memory.set_limit("cpu", None)
    assert same_bits(values_of(model), before)


class Unsayable(Signs):
    def update(self, parameter, state):
        class Mute(Exception):
            def __str__(self):
                raise LookupError("no catalogue of messages")

        raise Mute


def test_an_error_that_cannot_say_its_text_is_named_by_its_class(caplog):
    model = net()
    with caplog.at_level(logging.INFO, "brimful"):
        assert next_step(Unsayable(model.parameters())) == (0, 0, [])
    assert "before its first step: <unprintable Mute>" in caplog.text
