"""Planted leaks are found with their line and holder, within ten steps; clean loops raise no alarm."""

import gc
import logging
import re
import sys
import traceback
import types
from pathlib import Path

import numpy
import pytest
import torch
from rank_processes import _context

import brimful

sys.path.insert(0, str(Path(__file__).parents[2] / "leaks"))
import leak_loop

pytestmark = pytest.mark.usefixtures("whole_heap")


@pytest.fixture(autouse=True)
def swept(request):
    yield
    if "run_program" not in request.fixturenames:  # whose process does it
        gc.collect()  # what was planted is not the next test's to count


def _serve(pipe):
    """Runs programs; of each: whether what was found is right, and that, and what was logged, as text."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("brimful").addHandler(handler)
    logging.getLogger("brimful").setLevel("INFO")
    while program := pipe.recv():
        told.clear()
        try:
            leaks = leak_loop.run(program)
            pipe.send((leak_loop.is_right(program, leaks), [str(leak) for leak in leaks], told))
        except BaseException:
            pipe.send(traceback.format_exc())
        leaks = None
        gc.collect()


@pytest.fixture(scope="module")
def run_program():
    """Runs a program in a process whose heap is small: a search goes through all that the tests before have left."""
    mine, theirs = _context.Pipe()
    process = _context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    def run(program):
        mine.send(program)
        assert mine.poll(100), program
        answer = mine.recv()
        assert not isinstance(answer, str), answer
        return answer

    yield run
    process.kill()
    process.join()


@pytest.mark.parametrize("program", leak_loop.PLANTED, ids=lambda path: path.stem)
def test_a_planted_leak_is_found_with_its_line_its_holder_and_advice(program, run_program):
    is_right, leaks, _ = run_program(program)
    assert is_right, leaks


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kept_losses", "forward_hook", "retain_graph", "copied_history"])
def test_a_leak_on_a_gpu_is_found_with_its_line_and_its_holder(name):
    program = leak_loop.FOLDER / "planted" / f"{name}.py"
    torch.zeros(1, device="cuda")
    with torch.device("cuda"):
        leaks = leak_loop.run(program)
    assert leak_loop.is_right(program, leaks), [str(leak) for leak in leaks]


@pytest.mark.parametrize("program", leak_loop.CLEAN, ids=lambda path: path.stem)
def test_a_clean_loop_raises_no_alarm(program, run_program):
    fills = re.search(r"^# fills: (\w+)", program.read_text(), re.M)
    _, leaks, lines = run_program(program)
    assert leaks == []
    told = [line for line in lines if "memory grows" in line]
    assert len(told) == (1 if fills else 0), told
    assert all(re.search(rf"`{fills[1]}[\[`]", line) for line in told)
    assert all("may still be filling" in line for line in told)


@pytest.mark.parametrize("kind", ["dict", "numpy"])
def test_a_cache_that_never_stops_is_a_leak_in_the_end(kind):
    kept = {}
    found = []
    with brimful.LeakFinder() as finder:
        for number in range(32):
            value = torch.randn(64, 64)
            kept[number] = value.numpy() if kind == "numpy" else value
            found += finder.step()
    assert [leak.filling for leak in found] == [True, False]
    assert [leak.steps for leak in found] == [5, 25]
    (leak,) = finder.leaks
    assert (leak.filling, leak.holder.container) == (False, "kept")
    assert "filling" not in str(leak) and "filling" in str(found[0])


def test_what_is_copied_whole_is_a_leak_in_the_end_and_followed_again_by_the_next_loop():
    history = torch.zeros(0, 8)
    finder = brimful.LeakFinder()
    found = []
    with brimful.memory.track():
        for steps in (6, 26):  # the first loop ends while operators are followed
            with finder:
                for _ in range(steps):
                    history = torch.cat([history, torch.randn(16, 8)])
                    found += finder.step()
            assert len(finder.leaks) == (steps == 26)
    assert [leak.filling for leak in found] == [True, False]
    assert [(leak.steps, leak.bytes_per_step) for leak in found] == [(6, 512), (25, 512)]
    (leak,) = finder.leaks
    assert (leak.copied, leak.holder.path) == (True, "history")


class Rows(numpy.ndarray):
    """A subclass of the program's."""


def of_base(array):
    return array[1:][:, 1:]


@pytest.mark.parametrize("frozen_too", [False, True])
def test_an_array_of_numpys_holds_its_tensor(frozen_too):
    ways = {
        "[0]": lambda array: array,
        "[1][0]": lambda array: [array],
        "[2]['a']": lambda array: {"a": array},
        "[3]['a'][0]": lambda array: {"a": (array, 1)},
        "[4]['a'][1][1]": lambda array: {"a": {1: (1, of_base(array))}},
        "[5][0]": lambda array: [memoryview(of_base(array))],
        "[6][0]": lambda array: [array.view(Rows)],
    }
    tensors = [torch.randn(4, 4) for _ in range(len(ways) + 1)]
    data = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    alone = of_base(tensors.pop().numpy())
    held = [wrap(tensors.pop(0).numpy()) for wrap in ways.values()]
    gc.collect()  # lets the collector forget dicts and tuples of arrays
    if frozen_too:
        gc.freeze()
    try:
        *holders, of_alone = brimful._C._find_holders(data)
    finally:
        gc.unfreeze()
    for holder, way in zip(holders, ways, strict=True):
        assert holder.path.startswith(f"held{way}")
        assert holder.root == "local of test_an_array_of_numpys_holds_its_tensor()"
    assert of_alone.path == "alone"
    del held, alone


@pytest.mark.parametrize("other", [None, object(), types.SimpleNamespace(ndarray=3)])
def test_a_numpy_of_another_kind_is_left_alone(monkeypatch, other):
    monkeypatch.setitem(sys.modules, "numpy", other)
    tensor = torch.zeros(3)
    assert brimful.who_holds(tensor).path == "tensor"


def test_a_gradient_that_is_no_object_is_found_by_its_leaf():
    weight = torch.randn(8, 8, requires_grad=True)
    weight.square().sum().backward()
    data = weight.grad.data_ptr()
    gc.collect()
    (holder,) = brimful._C._find_holders([data])
    assert holder.path == "weight.grad"


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="steps: 1"):
        brimful.LeakFinder(steps=1)
    with pytest.raises(ValueError, match="warm_up: -1"):
        brimful.LeakFinder(warm_up=-1)


def test_nothing_is_found_where_there_was_nothing_to_see():
    with brimful.LeakFinder() as finder:
        pass
    assert finder.leaks == []
    with pytest.raises(RuntimeError, match="with statement"):
        finder.step()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with brimful.LeakFinder() as finder:
        brimful.memory.stop_tracking()
        optimizer.step()  # the program's own decision
    assert finder.leaks == []


def test_what_has_no_storage_has_no_holder():
    kept = [torch.empty(0), torch.empty(3, device="meta")]
    assert brimful.who_holds(kept[0]).kind == "unknown"
    with pytest.raises(TypeError, match=r"must be a torch.Tensor \(type: int\)"):
        brimful.who_holds(1)


def test_tracking_that_was_on_stays_on():
    with brimful.memory.track():
        with brimful.LeakFinder():
            pass
        assert brimful.memory.tracking()
    assert not brimful.memory.tracking()


@pytest.mark.smoke
def test_an_optimizer_ends_steps_where_nobody_else_does():
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history = []
    with brimful.LeakFinder() as finder:
        for _ in range(12):
            optimizer.zero_grad()
            history.append(model(torch.randn(8, 64)).sum())
            history[-1].backward()
            optimizer.step()
    (leak,) = finder.leaks
    assert leak.holder.container == "history"
    assert leak.holder.root == "local of test_an_optimizer_ends_steps_where_nobody_else_does()"


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_retain_graph_is_blamed_only_where_backward_was_given_it(keeps_graph):
    """An auxiliary output whose graph no backward has freed, with and without a backward that keeps its own."""
    model = torch.nn.Linear(64, 64)
    extra = []
    with brimful.LeakFinder() as finder:
        for _ in finder.watch(range(12)):
            extra.append(model(torch.randn(32, 64)).tanh())
            model(torch.randn(32, 64)).tanh().sum().backward(retain_graph=keeps_graph)
    (leak,) = finder.leaks
    assert leak.holder.container == "extra"
    assert ("retain_graph" in leak.advice) == keeps_graph


@pytest.mark.parametrize("names", [["Out"], ["_oh"], ["Out", "_{}"], ["_{}"]])
def test_the_outputs_of_a_notebook_are_named_as_such(monkeypatch, names):
    """IPython keeps what a cell returns in the dict Out and in a variable, _12."""
    user = sys.modules["__main__"]
    cache = names[0] if names[0] in ("Out", "_oh") else None  # of these the shell has both
    if cache:
        monkeypatch.setattr(user, cache, {}, raising=False)
    with brimful.LeakFinder() as finder:
        for number in finder.watch(range(1, 13)):
            value = torch.randn(64, 64)
            if cache:
                getattr(user, cache)[number] = value
            if "_{}" in names:
                monkeypatch.setattr(user, f"_{number}", value, raising=False)
            del value
    (leak,) = finder.leaks
    assert (leak.holder.kind, leak.holder.container) == ("notebook", cache or "Out")
    assert leak.advice.startswith("end the cell with a semicolon")


@pytest.mark.parametrize("name", ["outputs_1", "_", "_12a", "x12"])
def test_a_variable_of_another_name_is_no_output(monkeypatch, name):
    value = torch.randn(3)
    monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
    data = value.untyped_storage().data_ptr()
    del value
    (holder,) = brimful._C._find_holders([data])
    assert (holder.kind, holder.container) == ("variable", name)


class Keeper:
    __slots__ = ("kept",)


KEPT = Keeper()


@pytest.fixture
def frozen():
    """What lives before the test is left out of collections, and of gc.get_objects."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_what_is_frozen_holds_as_well(frozen, monkeypatch):
    monkeypatch.setattr(KEPT, "kept", [torch.zeros(3)], raising=False)
    holder = brimful.who_holds(KEPT.kept[0])
    assert (holder.path, holder.root) == ("KEPT.kept[0]", f"global of {__name__}")
    keeper = Keeper()
    keeper.kept = {"a": torch.zeros(3)}
    gc.freeze()
    holder = brimful.who_holds(keeper.kept["a"])
    assert (holder.path, holder.root) == (
        "keeper.kept['a']",
        "local of test_what_is_frozen_holds_as_well()",
    )


def test_a_leak_into_what_is_frozen_is_reported_in_time(frozen, monkeypatch):
    monkeypatch.setattr(KEPT, "kept", [], raising=False)
    with brimful.LeakFinder() as finder:
        for _ in finder.watch(range(12)):
            KEPT.kept.append(torch.randn(64, 64))
    (leak,) = finder.leaks
    assert (leak.holder.container, leak.holder.root) == ("KEPT.kept", f"global of {__name__}")


@pytest.mark.smoke
def test_who_holds_names_a_way_to_the_tensor():
    keeper = Keeper()
    keeper.kept = {"a": [torch.zeros(3), torch.ones(3)]}
    holder = brimful.who_holds(keeper.kept["a"][1])
    assert (holder.kind, holder.path) == ("sequence", "keeper.kept['a'][1]")
    assert holder.root == "local of test_who_holds_names_a_way_to_the_tensor()"


def test_the_search_holds_nothing_itself():
    before = brimful.memory.stats("cpu").used_bytes
    kept = [torch.zeros(1000)]
    holder = brimful.who_holds(kept[0])
    assert holder.container == "kept"
    del kept
    assert brimful.memory.stats("cpu").used_bytes == before
