"""What goes between the processes of a pipeline: structures, skips, and what is wrong with a batch."""

import collections
import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import raised
from torch import nn

import brimful

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class State:
    hidden: torch.Tensor
    scale: float


class Module(nn.Module):
    def __init__(self, function, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.function = function

    def forward(self, value):
        return self.function(self.linear, value)


def give(linear, x):
    hidden = linear(x)
    return {
        "pair": Pair(hidden.tanh(), None),
        "list": [hidden * 2, True, -(1 << 70), "text", b"\0", 1 + 2j],
        3: State(hidden.sigmoid(), 0.5),
        "mask": hidden.detach() > 0,
        "ids": torch.arange(len(x), dtype=torch.int32),
        "of": (torch.float16, torch.device("cpu"), torch.Size([2, 3])),
        "ordered": collections.OrderedDict(empty=()),
        "none": x.detach()[:0],
    }


def take(linear, value):
    assert type(value) is dict
    assert type(value["pair"]) is Pair and value["pair"].second is None
    assert value["list"][1:] == [True, -(1 << 70), "text", b"\0", 1 + 2j]
    assert type(value[3]) is State and value[3].scale == 0.5
    assert value["mask"].dtype == torch.bool and not value["mask"].requires_grad
    assert value["ids"].dtype == torch.int32
    assert value["of"] == (torch.float16, torch.device("cpu"), torch.Size([2, 3]))
    assert type(value["of"][2]) is torch.Size
    assert type(value["ordered"]) is collections.OrderedDict and value["ordered"] == {"empty": ()}
    assert value["none"].shape == (0, 4)
    hidden = value["pair"].first + value["list"][0] * value["mask"] * value[3].scale
    return linear(hidden + value[3].hidden * value["ids"][:, None])


def whole(functions, x, y, microbatches):
    """Gradients by stage of a loop over the microbatches in this process, and the loss."""
    torch.manual_seed(0)
    stages = [Module(function) for function in functions]
    loss = 0.0
    for begin in range(0, len(x), len(x) // microbatches):
        value = x[begin : begin + len(x) // microbatches]
        for stage in stages:
            value = stage(value)
        piece = F.mse_loss(value, y[begin : begin + len(x) // microbatches]) / microbatches
        piece.backward()
        loss += piece.item()
    return [[p.grad for p in stage.parameters()] for stage in stages], loss


def check(here, functions, expected, schedule):
    """Against what the same functions make in one process."""
    torch.manual_seed(0)
    stages = [Module(function) for function in functions]
    torch.manual_seed(1)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    gradients, loss = whole(expected, x, y, 4)
    mine = [i for i in range(len(stages)) if i % here.size == here.index]
    pipe = brimful.Pipeline(
        [stages[i] for i in mine],
        group=dist.group.WORLD,
        schedule=schedule,
        microbatches=4,
        loss_fn=F.mse_loss,
    )
    for step in range(1, 3):
        assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
        for i in mine:
            for p, wanted in zip(stages[i].parameters(), gradients[i], strict=True):
                assert torch.allclose(p.grad, step * wanted, rtol=1e-12, atol=1e-14)
    return True


def structures(here, schedule):
    return check(here, [give, take], [give, take], schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_structures_go_between_processes(ranks, schedule):
    assert ranks(structures, schedule) == [True, True]


def begin(linear, x):
    hidden = linear(x)
    brimful.pipeline.stash("long", hidden.tanh())
    brimful.pipeline.stash("short", hidden.sin())
    brimful.pipeline.stash("mask", hidden.detach() > 0)
    brimful.pipeline.stash("unused", hidden)
    brimful.pipeline.stash("nothing", None)
    return hidden


def middle(linear, x):
    hidden = linear(x + brimful.pipeline.pop("short"))
    brimful.pipeline.stash("from the middle", hidden.cos())
    return hidden


def past(linear, x):
    return linear(x.tanh())


def end(linear, x):
    popped = brimful.pipeline.pop("long") * brimful.pipeline.pop("mask")
    brimful.pipeline.pop("unused")
    assert brimful.pipeline.pop("nothing") is None
    return linear(x + popped + brimful.pipeline.pop("from the middle"))


class ByHand:
    """The same without stash and pop."""

    def __init__(self):
        self.kept = {}

    def begin(self, linear, x):
        hidden = linear(x)
        self.kept = {"long": hidden.tanh(), "short": hidden.sin(), "mask": hidden.detach() > 0}
        return hidden

    def middle(self, linear, x):
        hidden = linear(x + self.kept["short"])
        self.kept["middle"] = hidden.cos()
        return hidden

    def end(self, linear, x):
        popped = self.kept["long"] * self.kept["mask"]
        return linear(x + popped + self.kept["middle"])


def skips(here, schedule):
    hand = ByHand()
    functions = [begin, middle, past, end]
    return check(here, functions, [hand.begin, hand.middle, past, hand.end], schedule)


@pytest.mark.parametrize(
    ("schedule", "size"),
    [("1f1b", 4), ("zb_h1", 4), ("interleaved_1f1b", 2), ("looped_bfs", 2)],
)
def test_skips_go_past_processes_and_their_gradients_come_back(ranks, schedule, size):
    assert ranks(skips, schedule, size=size) == [True] * size


def unsendable(here):
    def give_set(linear, x):
        return linear(x), {1, 2}

    functions = [give_set, lambda linear, value: linear(value[0])]
    stage = Module(functions[here.index])
    pipe = brimful.Pipeline([stage], group=dist.group.WORLD, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4, dtype=torch.float64)
    error = raised(pipe.step, x, x)
    assert type(error) is (TypeError if here.index == 0 else brimful.RankFailed)
    assert "set" in str(error)
    return error.seconds


def test_what_does_not_go_to_another_process_is_named(ranks):
    assert max(ranks(unsendable)) < 2


def missing_name(here):
    functions = [
        lambda linear, x: linear(x),
        lambda linear, x: linear(x + brimful.pipeline.pop("a")),
    ]
    pipe = brimful.Pipeline(
        [Module(functions[here.index])],
        group=dist.group.WORLD,
        microbatches=2,
        loss_fn=F.mse_loss,
    )
    x = torch.randn(4, 4, dtype=torch.float64)
    error = raised(pipe.step, x, x)
    assert "no earlier stage has stashed" in str(error)
    return error.seconds


def test_a_name_that_nobody_stashed_fails_on_all(ranks):
    assert max(ranks(missing_name)) < 2


def refused(here, stepped_before):
    torch.manual_seed(0)
    stage = Module(lambda linear, x: linear(x))
    pipe = brimful.Pipeline([stage], group=dist.group.WORLD, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4, dtype=torch.float64)
    slowest = 0.0
    if stepped_before:
        pipe.step(x, x)
    for failing in range(here.size):
        for batch, target in ((object(), x), (x, x[:3]), (x[:0], x[:0]), ({}, x)):
            mine = here.index == failing
            error = raised(pipe.step, batch if mine else x, target if mine else x)
            assert isinstance(error, (ValueError, TypeError) if mine else brimful.RankFailed)
            slowest = max(slowest, error.seconds)
        error = raised(pipe.forward, object() if here.index == failing else x)
        assert isinstance(
            error, (ValueError, TypeError) if here.index == failing else brimful.RankFailed
        ), error
        pipe.step(x, x)
    return slowest


@pytest.mark.parametrize("stepped_before", [False, True])
def test_a_bad_batch_on_one_process_is_reported_to_the_others(ranks, stepped_before):
    assert max(ranks(refused, stepped_before)) < 2


def without_loss(here):
    began = time.monotonic()
    pipe = brimful.Pipeline(
        [Module(lambda linear, x: linear(x))],
        group=dist.group.WORLD,
        microbatches=2,
        loss_fn=F.mse_loss if here.index == 0 else None,
    )
    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(TypeError if here.index == 1 else brimful.RankFailed, match="loss function"):
        pipe.step(x, x)
    return time.monotonic() - began


def test_a_process_without_loss_function_is_reported_to_the_others(ranks):
    assert max(ranks(without_loss)) < 2


def different(here, option):
    options = {"schedule": ["1f1b", "gpipe"], "microbatches": [2, 4], "max_retries": [1, 2]}
    chosen = {"microbatches": 4, option: options[option][here.index]}
    pipe = brimful.Pipeline(
        [Module(lambda linear, x: linear(x))],
        group=dist.group.WORLD,
        loss_fn=F.mse_loss,
        **chosen,
    )
    x = torch.randn(4, 4, dtype=torch.float64)
    error = raised(pipe.step, x, x)
    assert isinstance(error, ValueError) and "differ" in str(error)
    return error.seconds


@pytest.mark.parametrize("option", ["schedule", "microbatches", "max_retries"])
def test_processes_that_were_set_up_differently_are_refused(ranks, option):
    assert max(ranks(different, option)) < 2


class Head(nn.Module):
    """Ends with the weight that the first stage has too."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x):
        return F.linear(x.tanh(), self.weight)


def tie(here, schedule):
    torch.manual_seed(0)
    weight = torch.randn(4, 4, dtype=torch.float64)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    shared = weight.clone().requires_grad_()
    reference = torch.optim.SGD([shared], lr=0.1)
    stage = Head(weight + here.index)  # the lowest rank's values count
    pipe = brimful.Pipeline(
        [stage],
        group=dist.group.WORLD,
        schedule=schedule,
        microbatches=4,
        loss_fn=F.mse_loss,
        tied={"weight": stage.weight},
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for _ in range(3):
        for accumulated in (1, 2):
            pipe.step(x, y)
            F.mse_loss(F.linear(F.linear(x.tanh(), shared).tanh(), shared), y).backward()
            assert torch.allclose(stage.weight.grad, shared.grad, rtol=1e-12), accumulated
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert torch.allclose(stage.weight, shared, rtol=1e-12)
    return stage.weight.tolist()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_copies_of_a_tied_weight_get_the_sum_of_their_gradients(ranks, schedule):
    first, second = ranks(tie, schedule)
    assert first == second


def tie_badly(here):
    x = torch.randn(4, 4, dtype=torch.float64)
    slowest = 0.0
    for names, shapes, words in (
        (("a", "b"), (4, 4), "on one rank alone"),
        (("a", None), (4, 4), "on one rank alone"),
        (("a", "a"), (4, 5), "differ"),
    ):
        stage = Head(torch.randn(shapes[here.index], 4, dtype=torch.float64))
        name = names[here.index]
        pipe = brimful.Pipeline(
            [stage],
            group=dist.group.WORLD,
            microbatches=2,
            loss_fn=F.mse_loss,
            tied={name: stage.weight} if name else None,
        )
        error = raised(pipe.step, x, x)
        assert isinstance(error, ValueError) and words in str(error), error
        slowest = max(slowest, error.seconds)
    return slowest


def test_weights_that_are_tied_to_nothing_are_refused_on_all(ranks):
    assert max(ranks(tie_badly)) < 2


def test_a_weight_is_not_tied_to_itself():
    stage = Head(torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"one copy .*give the group"):
        brimful.Pipeline([stage], loss_fn=F.mse_loss, tied={"weight": stage.weight})


def overflow(here, where):
    torch.manual_seed(0)
    stage = nn.Linear(4, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    pipe = brimful.Pipeline(
        [stage], group=dist.group.WORLD, microbatches=2, loss_fn=F.mse_loss, scaler=scaler
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    x = torch.randn(4, 4)
    scales, moved = [], []
    for step in range(3):
        hook = stage.weight.register_hook(
            lambda g: g * float("inf") if step == 1 and here.index == where else g  # noqa: B023
        )
        before = stage.weight.detach().clone()
        optimizer.zero_grad()
        pipe.step(x, x)
        hook.remove()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, stage.weight))
    return scales, moved


@pytest.mark.parametrize("where", [0, 1])
def test_gradients_that_overflow_on_one_process_are_skipped_by_all(ranks, where):
    wanted = ([512.0, 256.0, 512.0], [True, False, True])
    assert ranks(overflow, where) == [wanted, wanted]
