"""Whatever an error's text is, the failing rank raises that very error, and the others know of it in the same step."""

import os
from functools import partial

import pytest
import torch
from models import classes, cross_entropy, dropout_net, wrap
from torch.utils._python_dispatch import TorchDispatchMode

import brimful


class DecodeError(Exception):
    pass


class Mute(DecodeError):
    def __str__(self):
        raise LookupError("no catalogue of messages")


class NoText(DecodeError):
    def __str__(self):
        return 3


class Unwell(RuntimeError):
    def __str__(self):
        raise LookupError("no catalogue of messages")


class Full(MemoryError):
    def __str__(self):
        raise LookupError("no catalogue of messages")


#: How each is made, and what the other ranks read of it.
ERRORS = {
    "not UTF-8": (lambda: DecodeError(os.fsdecode(b"caf\xe9.jpg")), r"DecodeError: caf\udce9.jpg"),
    "a NUL": (lambda: DecodeError("before\0behind"), r"DecodeError: before\x00behind"),
    "raises": (Mute, "<unprintable Mute>"),
    "no str": (NoText, "<unprintable NoText>"),
    "a RuntimeError that raises": (Unwell, "<unprintable Unwell>"),
    "beyond ASCII": (lambda: ValueError("größer 文"), "ValueError: größer 文"),
    "long": (lambda: ValueError("x" + "文" * 3000), "ValueError: x文文"),
}


def scope(model, sizer, optimizer, step, fail):
    with model.step():
        loss = cross_entropy(model, classes(8, seed=step))
        fail()
        loss.backward()


def forward(model, sizer, optimizer, step, fail):
    def loss_fn(model, piece):
        fail()
        return cross_entropy(model, piece)

    sizer.step(classes(8, seed=step), loss_fn)


def backward(model, sizer, optimizer, step, fail):
    def loss_fn(model, piece):
        loss = cross_entropy(model, piece)
        loss.register_hook(lambda _: fail())
        return loss

    sizer.step(classes(8, seed=step), loss_fn)


def plain_backward(model, sizer, optimizer, step, fail):
    with model.step():
        loss = cross_entropy(model, classes(8, seed=step))
        loss.register_hook(lambda _: fail())
        loss.backward()


def batches(model, sizer, optimizer, step, fail):
    def data():
        fail()
        yield classes(8, seed=step)

    for batch in sizer.batches(data()):
        sizer.step(batch, cross_entropy)


def optimizer_step(model, sizer, optimizer, step, fail):
    handle = optimizer.register_step_pre_hook(lambda *_: fail())
    try:
        sizer.step(classes(8, seed=step), cross_entropy)
        optimizer.step()
    finally:
        handle.remove()


PLACES = {
    f.__name__: f for f in (scope, forward, backward, plain_backward, batches, optimizer_step)
}


def job(rank, place, names):
    found = {}
    for name in names:
        make, _ = ERRORS[name]
        model = wrap(dropout_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizer = brimful.BatchSizer(model, optimizer)
        made = make()
        seen = []
        for step in range(3):

            def fail(made=made, step=step):
                if rank.index == 1 and step == 1:
                    raise made

            try:
                PLACES[place](model, sizer, optimizer, step, fail)
                seen.append(None)
            except Exception as error:
                if error is made:
                    seen.append("its own")
                elif error.__cause__ is made:
                    seen.append(f"{type(error).__name__} of its own")
                elif isinstance(error, brimful.RankFailed):
                    seen.append(f"RankFailed {error.rank}: {error}")
                else:
                    seen.append(repr(type(error)) + ascii(str(error)))
            model.zero_grad()
        found[name] = seen
        rank.progress()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_the_failing_rank_has_its_own_error_and_the_others_its_text(ranks, place):
    half = place == "optimizer_step"  # whose ranks differ from then on
    names = list(ERRORS)[: 1 if half else None]
    healthy, failed = ranks(job, place, names, timeout_s=5)
    for name in names:
        _, text = ERRORS[name]
        own = failed[name]
        assert own[1] == ("HalfStepError of its own" if half else "its own"), (name, own)
        assert own[0] is None and (half or own[2] is None), (name, own)
        told = healthy[name][2] if half else healthy[name][1]  # after the step, in the next
        assert told is not None and told.startswith("RankFailed 1: ") and text in told, (name, told)


class Failing(TorchDispatchMode):
    """Raises in the operator of this number."""

    def __init__(self, number, error):
        super().__init__()
        self.left, self.error = number, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return func(*args, **(kwargs or {}))


def steps_under(mode, step):
    with mode:
        step()


def split_step():
    model = torch.nn.Linear(6, 3)
    return partial(brimful.BatchSizer(model, pieces=2).step, classes(8), cross_entropy)


def mapping():
    return partial(brimful.map_batches, lambda x: x * 2, torch.randn(8, 3), pieces=2)


def pipeline():
    loss_fn = torch.nn.functional.cross_entropy
    pipe = brimful.Pipeline([torch.nn.Linear(6, 3)], microbatches=2, loss_fn=loss_fn)
    return partial(pipe.step, *classes(8))


def whole_step():
    model = torch.nn.Linear(6, 3)
    return partial(brimful.BatchSizer(model).step, classes(8), cross_entropy)


def check_of_a_split():
    return partial(brimful.verify_split, torch.nn.Linear(6, 3), classes(8), cross_entropy)


STEPS = [whole_step, split_step, mapping, pipeline, check_of_a_split]


@pytest.mark.parametrize("make", STEPS)
def test_an_error_of_a_dispatch_mode_comes_through_our_own_operators(make):
    """By a mode of the program's, some operators of the library's own raise too."""
    counting = Failing(-1, None)
    steps_under(counting, make())
    count = -1 - counting.left
    assert count > 5
    for number in range(1, count + 1):
        error = DecodeError(f"in operator {number}")
        with pytest.raises(Exception) as caught:
            steps_under(Failing(number, error), make())
        assert caught.value is error, (number, repr(caught.value))


@pytest.mark.parametrize("make", STEPS)
def test_a_shortage_that_a_dispatch_mode_raises_is_repeated_or_raised(make, caplog):
    counting = Failing(-1, None)
    steps_under(counting, make())
    for number in range(1, -counting.left):
        try:
            steps_under(Failing(number, torch.OutOfMemoryError("planted")), make())
        except torch.OutOfMemoryError as error:
            assert str(error) == "planted", number


def test_a_memory_error_that_cannot_say_its_text_is_a_retry(no_limit):
    model = torch.nn.Linear(6, 3)
    refused = []

    def loss_fn(model, piece):
        if not refused:
            refused.append(len(piece[0]))
            raise Full
        return cross_entropy(model, piece)

    outcome = brimful.BatchSizer(model).step(classes(8), loss_fn)
    assert outcome.retries == 1 and refused == [8]
