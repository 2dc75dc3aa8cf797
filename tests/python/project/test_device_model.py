"""The comparison of recorded steps with those of the device without arithmetic."""

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.device_model import (
    child,
    device,
    host_bytes,
    interval,
    large,
    llama,
    operators,
    recorded,
    seconds,
    steps,
    workspaces,
)

MIB = 1 << 20
SIMULATED = hasattr(ctypes.CDLL(None), "sim_cuda_calls")
PLACES = (2, 8)  # of nine sizes: 16 rows, and the largest
CLOSE = 0.01


def step(here, there, library=False, operators=()):
    keys = ("base", "peak_over_base", "reserved_over_base", "events")
    found = dict(zip(keys, here, strict=True)) | {"operators": operators}
    return recorded.Step("a model", 2, library, dict(zip(keys, there, strict=True)), found)


def test_the_first_event_that_differs_has_the_operator_at_work():
    there = [["a", 8], ["a", 16], ["f", 0], ["a", 4]]
    here = [["a", 8], ["a", 16], ["f", 1], ["a", 4]]
    found = step(
        (0, 24, 0, here), (0, 24, 0, there), operators=((0, "one"), (1, "two"), (3, "four"))
    )
    assert not found.equal
    assert found.first_difference() == "event 2: ['f', 1] here, ['f', 0] there, two"
    assert step((0, 24, 0, there), (0, 24, 0, there)).first_difference() == ""
    assert "more events" in step((0, 24, 0, there[:2]), (0, 24, 0, there)).first_difference()


def test_frees_that_follow_each_other_have_no_order():
    """Autocast frees its casts in the order of a hash."""
    there = [["a", 8], ["a", 16], ["f", 0], ["f", 1], ["a", 4], ["f", 2]]
    here = [["a", 8], ["a", 16], ["f", 1], ["f", 0], ["a", 4], ["f", 2]]
    assert step((0, 24, 0, here), (0, 24, 0, there)).equal
    here[3], here[4] = here[4], here[3]
    assert not step((0, 24, 0, here), (0, 24, 0, there)).equal


@pytest.mark.parametrize(
    "least, most, misses",
    [(8, 12, 0), (10, 10, 0), (11, 12, 2), (8, 9, 2)],
)
def test_a_peak_outside_of_the_interval_is_a_miss(monkeypatch, least, most, misses):
    """Once without the model's workspaces and once without the size's."""

    def steps(_files, _leave_out, unknown):
        end = least if unknown == "least" else most
        yield step((0, end * MIB, 0, []), (0, 10 * MIB, 0, []))

    monkeypatch.setattr(recorded, "steps", steps)
    (figure,) = interval.measure(quick=True)
    assert (figure.value, figure.rounds) == (misses, 2)


@pytest.mark.parametrize(
    "here, there, allocated, reserved",
    [
        ((0, 10 * MIB, 40 * MIB), (0, 10 * MIB, 40 * MIB), 0, 0),
        ((0, 8 * MIB, 60 * MIB), (0, 10 * MIB, 80 * MIB), 0.2, 0),  # one segment less
        ((0, 11 * MIB, 50 * MIB), (0, 10 * MIB, 100 * MIB), 0.1, 0.5),
        ((0, 100, 0), (9000, 1000, 0), 0.99, 0),  # too small to be judged alone: of the total
        ((11 * MIB, 10 * MIB, 0), (10 * MIB, 10 * MIB, 0), 0.05, 0),  # what was there before
    ],
)
def test_errors_are_of_peaks_and_totals_and_segments_are_whole(here, there, allocated, reserved):
    found = step((*here, []), (*there, []))
    assert steps._allocated(found) == pytest.approx(allocated)
    assert steps._reserved(found) == pytest.approx(reserved)


def test_a_trace_of_the_allocator_is_read_as_it_was_recorded():
    trace = [
        {"action": "segment_alloc", "addr": 1, "size": 64},
        {"action": "alloc", "addr": 1, "size": 8},
        {"action": "free_requested", "addr": 1, "size": 8},
        {"action": "free_completed", "addr": 1, "size": 8},
        {"action": "alloc", "addr": 1, "size": 4},
        {"action": "free_completed", "addr": 9, "size": 4},  # of before
        {"action": "free_completed", "addr": 1, "size": 4},
    ]
    assert child.events_of(trace) == [["segment_alloc", 64], ["a", 8], ["f", 1], ["a", 4], ["f", 3]]


@pytest.mark.parametrize(
    "here, there, found",
    [
        ([8, 101, 16], [8, 4, 16], [(101, 4)]),
        ([8, 101, 16], [8, 16], [(101, 0)]),
        ([101, 8, 103, 8], [8, 8, 8], [(101, 0), (103, 8)]),  # one of equal sizes is missing
        ([101, 103], [7, 9], [(101, 7), (103, 9)]),
        ([8, 101], [9, 4], None),
    ],
)
def test_workspaces_are_found_among_the_allocations(here, there, found):
    assert workspaces.found_in(here, there, {101, 103}) == found


def test_another_torch_s_steps_are_not_compared(monkeypatch):
    monkeypatch.setattr(recorded, "TORCH", "1.0")
    with pytest.raises(device.Unavailable, match=r"recorded with torch 1\.0 \(found: "):
        next(recorded.steps())


def test_the_recorded_steps_are_of_sixteen_models():
    cases = [recorded.read(file) for file in recorded.FILES]
    assert sum(len(models) for models in cases) == 16
    assert all(len(found) >= 5 for models in cases for found in models.values())


def test_the_large_model_has_the_parameters_of_llama_7b():
    with torch.device("meta"):
        model = llama.Llama()
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616


@pytest.mark.parametrize(
    "on_device, value", [(8000, 100.0), (7999, None)], ids=["all there", "states are missing"]
)
def test_the_host_s_bytes_are_those_above_an_empty_process(monkeypatch, on_device, value):
    """Of a model whose states are on the device: two bytes each for parameter, gradient and two moments."""
    answers = {
        0: {"host_bytes": 50, "parameters": 0, "device_bytes": 512},
        large.LAYERS: {"host_bytes": 150, "parameters": 1000, "device_bytes": on_device},
    }
    monkeypatch.setattr(host_bytes, "_taken", answers.__getitem__)
    (figure,) = host_bytes.measure(quick=False)
    assert figure.value == value
    assert (figure.reason is None) == (value is not None)


def test_the_worse_of_two_ratios_of_seconds_counts(monkeypatch):
    taken = {
        "ResNet-50 fp32": {"cuda": [1.0, 1.0, 1.0], "cpu": [10.0, 10.0, 10.0]},
        "GPT-2 fp32": {"cuda": [1.0, 3.0, 2.0], "cpu": [10.0, 10.0, 10.0]},
    }
    monkeypatch.setattr(seconds, "_taken", lambda model, *_: taken[model])
    (figure,) = seconds.measure(quick=False)
    assert figure.value == pytest.approx(0.2)
    assert figure.low == pytest.approx(0.1) and figure.high == pytest.approx(0.3)


def blocks(step):
    """Its allocations and what frees which of them, without segments, which depend on what was there before."""
    made = {}
    found = []
    for place, (action, what) in enumerate(step["events"]):
        if action == "a":
            made[place] = len(made)
            found.append((action, what))
        elif action == "f":
            found.append((action, made[what]))
    return found


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.skipif(not SIMULATED, reason="runs on the device without arithmetic")
def test_twelve_models_take_what_they_took_on_an_h200(monkeypatch):
    """Event by event with the torch that was recorded. Later ones have workspaces that weigh in small steps alone."""
    libraries = Path(os.environ["LD_PRELOAD"].split(":")[0]).parent
    monkeypatch.setenv("BRIMFUL_DEVICE_LIBRARIES", str(libraries))
    monkeypatch.delenv("BRIMFUL_DEVICE_PYTHON", raising=False)
    monkeypatch.delenv("LD_PRELOAD")
    cases = {
        model: [steps[place] for place in PLACES]
        for file in recorded.FILES
        for model, steps in recorded.read(file).items()
        if len(steps) == 9
    }
    assert len(cases) == 12
    found = list(recorded.run(cases))
    assert len(found) == 24
    if torch.__version__ == recorded.TORCH:
        judged = found
        for taken in found:
            if not taken.library:
                assert blocks(taken.here) == blocks(taken.there), taken.first_difference()
    else:
        judged = [taken for taken in found if taken.rows == cases[taken.model][-1]["rows"]]
    for taken in judged:
        assert abs(taken.error("peak_over_base")) < CLOSE, (taken.model, taken.rows)


def test_operators_that_need_what_is_not_there_are_not_counted():
    outcomes = {"add": "runs", "eigh": "sentence", "histogram": "none", "cov": "error", "x": "ends"}
    found = operators.figure([(name, outcome, "why") for name, outcome in outcomes.items()], {})
    assert (found.value, found.rounds) == (1 / 3, 3)
    assert found.conditions["failed"] == {"cov": "why", "x": "why"}
    assert (found.conditions["sentence"], found.conditions["none"]) == (["eigh"], ["histogram"])


def test_operators_are_not_judged_without_the_runtime(monkeypatch, tmp_path):
    monkeypatch.setenv("BRIMFUL_DEVICE_LIBRARIES", str(tmp_path))
    (figure,) = operators.measure(quick=True)
    assert figure.value is None and "needs one build of the simulated CUDA runtime" in figure.reason
