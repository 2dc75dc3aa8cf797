"""Probes in a program whose objects raise, lie or never end: nothing of it reaches the program, or is called at all."""

import gc
import logging
import random
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import brimful
from brimful import memory

pytestmark = pytest.mark.usefixtures("whole_heap")

CALLED = []


class Stop(BaseException):
    """No Exception: what catches those does not catch this."""


def raises(kind):
    def method(self, *_, **__):
        CALLED.append(kind.__name__)
        raise kind("planted")

    return method


def never_ends(self, *given, **named):
    CALLED.append("recursion")
    return never_ends(self, *given, **named)


METHODS = [
    f"__{name}__" for name in ("repr", "str", "len", "getattr", "getitem", "iter", "eq", "bool")
]
METHODS += ["__dir__", "__format__", "__fspath__", "items", "keys", "values", "get", "parameters"]
METHODS += ["named_modules", "shape", "data", "grad", "maxlen", "cache_info"]
PROPERTIES = [
    "__class__",
    "__dict__",
    "__closure__",
    "__self__",
    "func",
    "args",
    "kept",
    "__name__",
]
BEHAVIOURS = [raises(kind) for kind in (ValueError, RuntimeError, Stop, SystemExit)] + [never_ends]


def hostile_class(random, base):
    """A class that behaves badly in some of its methods and properties, and has a name that breaks lines."""
    names = random.sample(METHODS, 8)
    body = {name: random.choice(BEHAVIOURS) for name in names}
    if base in (object, list):
        body |= {name: property(random.choice(BEHAVIOURS)) for name in random.sample(PROPERTIES, 3)}
        body["__slots__"] = () if random.random() < 0.2 and base is list else ("slot", "__dict__")
        if "__dict__" in body and body["__slots__"]:
            body["__slots__"] = ("slot",)
    if base is dict:
        body.pop("__eq__", None)
    if "__eq__" in body:
        body["__hash__"] = object.__hash__
    return type(random.choice(["Odd", "Two\nlines", "\x1b[31mRed"]), (base,), body)


def hostile_holder(random, kept):
    """Something odd that holds ``kept``: a list, a dict, an attribute, a key, a closure."""
    base = random.choice([object, list, dict, tuple, torch.nn.Module, Exception])
    kind = hostile_class(random, base)
    if base is tuple:
        return kind([kept])
    held = kind.__new__(kind)
    if base is list:
        list.append(held, kept)
    elif base is dict:
        dict.__setitem__(held, random.choice(["a\nb", hostile_class(random, object)]), kept)
    elif base is torch.nn.Module and random.random() < 0.5:
        return held  # whose __init__ was never called
    else:
        own = brimful._C._own_attribute(held, "__dict__")
        if issubclass(type(own), dict):
            own[random.choice(["kept", "two\nlines", "\udcff"])] = kept
    return random.choice([held, [held], {"a": held}, lambda: held])


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class Handler(logging.Handler):
    def emit(self, record):
        raise RuntimeError("planted in a handler")


@pytest.fixture(autouse=True)
def swept():
    CALLED.clear()
    yield
    gc.collect()


@pytest.mark.parametrize("kind", ["function", "checkpoint", "stack"])
def test_losses_whose_graph_was_freed_end_nothing(kind):
    """A freed graph raises where what it saved is asked for: "Trying to backward through the graph a second time"."""
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ways = {
        "function": lambda x: Twice.apply(model(x)),
        "checkpoint": lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
        "stack": lambda x: torch.stack([model(x), model(x).exp()]).prod(0),
    }
    losses, unrelated, x = [], torch.zeros(3), torch.randn(4, 16)
    with brimful.LeakFinder() as finder:
        for _ in range(12):
            losses.append(ways[kind](x).sum())
            losses[-1].backward()
            optimizer.step()
        assert brimful.who_holds(unrelated).path == "unrelated"
    assert "losses" in [leak.holder.container for leak in finder.leaks]


@pytest.mark.parametrize("seed", range(6))
def test_hostile_objects_are_not_called_and_end_nothing(seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setattr(sys.modules["__main__"], "odd\nname", None, raising=False)
    own_globals = vars(sys.modules[__name__])
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters())
    kept, around = [], [hostile_holder(draw, torch.zeros(9)) for _ in range(6)]
    monkeypatch.setitem(own_globals, "AROUND", hostile_holder(draw, around))
    CALLED.clear()
    with memory.track(report=tmp_path / "oom.html"), brimful.LeakFinder(warm_up=0) as finder:
        for _ in range(9):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            kept.append(hostile_holder(draw, torch.randn(32, 32)))
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        holders = [brimful.who_holds(tensor) for tensor in tensors[-4:]]
        memory.peak_by_category()
        memory.live_by_category()
        str(memory.live())
        limit = memory.stats("cpu").used_bytes + 1000
        memory.set_limit("cpu", limit)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1 << 20)
        finally:
            memory.set_limit("cpu", None)
        str(memory.last_oom())
    assert CALLED == []
    for text in [*map(str, finder.leaks), *(h.path + h.root + h.container for h in holders)]:
        assert "\n" not in text and "\x1b" not in text, text


@pytest.mark.parametrize("method", BEHAVIOURS)
def test_an_error_that_cannot_say_what_it_is_is_explained(method):
    class Odd(RuntimeError):
        __str__ = __repr__ = method
        __cause__ = property(method)

    assert brimful.explain(Odd()).kind == "other"
    assert brimful.explain(RuntimeError("a \udcff\n"), stderr="\udcff").kind == "other"
    thing = type("Thing", (), {"__class__": property(method)})()
    for function in (brimful.explain, brimful.who_holds):
        with pytest.raises(TypeError, match="type: Thing"):
            function(thing)


class Refusing(torch.Tensor):
    """Answers nothing that is asked of it."""

    @classmethod
    def __torch_function__(cls, function, types, given=(), named=None):
        CALLED.append(str(function))
        raise Stop("planted")

    grad = nbytes = property(raises(Stop))


def test_tensors_of_a_class_that_refuses_are_seen_past():
    kept = torch.zeros(5).as_subclass(Refusing)
    model = torch.nn.Module()
    dict.__setitem__(model._parameters, "odd", kept)
    assert brimful.who_holds(kept).path == "kept"
    with memory.track():
        torch.ones(10)
        assert memory.peak_by_category().bytes > 0
    assert brimful.memory._oom.size_of(model) == 20
    assert CALLED == []
    assert brimful.who_holds(torch.eye(2).to_sparse()).kind == "unknown"
    assert memory.find_block(torch.eye(2).to_sparse()) is None
    with torch._subclasses.FakeTensorMode():
        fake = torch.nn.Linear(3, 3)
    assert brimful.who_holds(fake.weight).kind == "unknown"
    memory.live_by_category(models=fake)


def test_a_search_that_fails_and_a_handler_that_raises_end_nothing(monkeypatch):
    logger = logging.getLogger("brimful")
    monkeypatch.setattr(logger, "handlers", [Handler()])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with brimful.LeakFinder() as finder:

        class Failing:
            leaks = ()

            def check(self):
                raise RuntimeError("planted in the finder")

        core, finder._core = finder._core, Failing()
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        finder._core = core
        kept = []
        for _ in finder.watch(range(12)):
            kept.append(torch.randn(64))
        assert len(finder.leaks) == 1
        steps = []
        for step in finder.watch(range(3)):
            memory.stop_tracking()  # the program's own decision
            steps.append(step)
    assert steps == [0, 1, 2]


def test_a_writer_and_a_model_that_raise(caplog):
    class Writer:
        def add_scalar(self, *_):
            raise type("Odd", (Stop,), {"__str__": never_ends})("planted")

    with brimful.monitor.Monitor(interval_ms=1, writer=Writer()) as watch:
        while watch.samples < 2:
            pass
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the monitor writes no more scalars: Odd"
    model = torch.nn.Linear(3, 3)
    model.__dict__["odd"] = hostile_class(random.Random(1), object)()
    found = brimful.summary(model, torch.ones(2, 3))
    assert len(found.modules) == 1
    with pytest.raises(TypeError):
        memory.start_tracking(modules=3)
    assert not memory.tracking()
    memory.start_tracking(modules=torch.nn.ModuleDict({"\udcff": model}))
    memory.stop_tracking()
