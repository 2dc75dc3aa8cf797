"""Errors are explained by their message, by what was measured, and by the operators before them."""

import builtins
import json
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import brimful
from brimful import _C

CORPUS = sorted((Path(__file__).parents[2] / "errors").glob("*.json"))


def test_the_corpus_has_what_was_promised():
    names = [path.stem for path in CORPUS]
    kinds = [name.split("_")[0] for name in names]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "hidden": 44,
        "not": 22,
        "own": 9,
        "unknown": 8,
    }


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_real_errors_are_explained(path):
    case = json.loads(path.read_text())
    out = _C._explain(case["text"], case["types"], case.get("free_bytes"), None, False)
    assert {"kind": out.kind, "is_memory": out.is_memory} == case["expect"]
    assert case.get("cause", "") in out.cause
    assert case.get("remedy", "") in out.remedy
    assert out.cause and out.remedy


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_real_errors_are_explained_as_exceptions_of_this_process(path):
    case = json.loads(path.read_text())
    ours = {"OutOfMemoryError": torch.OutOfMemoryError, "BatchTooLarge": brimful.BatchTooLarge}
    name = case["types"][0] if case["types"] else None
    kind = ours.get(name, getattr(builtins, str(name), RuntimeError))
    error = kind(case["text"]) if name else case["text"]
    out = brimful.explain(error, free_bytes=case.get("free_bytes"))
    if case["expect"]["is_memory"] is not None:
        assert {"kind": out.kind, "is_memory": out.is_memory} == case["expect"]


@pytest.mark.smoke
def test_a_real_refusal_of_the_cpu_is_memory(no_limit):
    brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes + 1000)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 20)
    out = brimful.explain(caught.value)
    assert (out.kind, out.is_memory) == ("out_of_memory", True)
    assert "host's memory" in out.cause
    assert "asked for: 4.0 MiB" in out.evidence


def test_memory_errors_of_python_are_memory():
    assert brimful.explain(MemoryError()).kind == "out_of_memory"
    assert brimful.explain(KeyError("label")).kind == "other"


def test_an_error_from_another_one_is_explained_with_it():
    try:
        try:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
        except RuntimeError as inner:
            raise ValueError("the layer failed") from inner
    except ValueError as error:
        assert brimful.explain(error).kind == "hidden_out_of_memory"


def test_an_error_is_explained_by_the_type_of_the_one_that_it_came_from():
    for inner in (MemoryError(), torch.OutOfMemoryError("")):
        try:
            try:
                raise inner
            except Exception as error:
                raise ValueError("no batch") from error
        except ValueError as error:
            assert brimful.explain(error).is_memory is True
    looped = RuntimeError("a"), RuntimeError("b")
    looped[0].__cause__, looped[1].__cause__ = looped[1], looped[0]
    assert brimful.explain(looped[0]).is_memory is None


def test_an_assertion_about_a_value_is_not_put_down_to_an_index():
    with pytest.raises(IndexError), brimful.op_ring():
        look_up(net(), torch.tensor([3, 10]))
    out = brimful.explain(
        RuntimeError(
            "Assertion `input_val >= zero && input_val <= one` failed. device-side assert triggered"
        )
    )
    assert (out.kind, "indices" in out.remedy) == ("value", False)
    _C._clear_op_ring()


def test_what_brimful_raises_where_no_split_fits_is_explained_by_its_own_advice(no_limit):
    layer, batch = torch.nn.Linear(10, 10), torch.ones(4, 10)
    sizer = brimful.BatchSizer(layer)
    brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes + (1 << 20))
    with pytest.raises(brimful.BatchTooLarge) as caught:
        sizer.step(batch, lambda model, part: torch.cat([model(part)] * 100000).mean())
    for error in (caught.value, str(caught.value), f"brimful.BatchTooLarge: {caught.value}"):
        out = brimful.explain(error)
        assert (out.kind, out.is_memory) == ("out_of_memory", True)
        assert out.cause.startswith("no split of the batch fits")
        assert caught.value.advice[0] in out.remedy
        assert "BatchSizer" not in out.remedy


def explained(ladder, bytes):
    """Of a row that lacks so many bytes, by the ladder that its sizer has."""
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    sizer = brimful.BatchSizer(model, ladder=ladder)
    row = torch.randn(1, 1 << 15, 64)  # beside which what other tests have left is little
    brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes + bytes)
    with pytest.raises(brimful.BatchTooLarge) as caught:
        sizer.step(row, lambda model, part: model(part).square().mean())
    brimful.memory.set_limit("cpu", None)
    return brimful.explain(caught.value)


def test_the_ladder_is_advised_where_one_row_does_not_fit(no_limit, monkeypatch):
    out = explained("split", 64 << 20)
    assert "let the ladder recompute and offload what one row saves (ladder=[" in out.remedy
    out = explained("auto", 64 * 200_000)
    assert "all that it saves for backward offloaded (peak: " in out.evidence[0]
    assert "split the model over several devices (Pipeline)" in out.remedy
    assert "is recomputed or offloaded already" in out.remedy
    monkeypatch.setenv("BRIMFUL_SCRATCH_DIR", "/proc")
    out = explained("auto", 64 * 200_000)
    assert "8 modules recomputed (0.0, 1.0, 2.0, 3.0, ...) (peak: " in out.evidence[0]
    assert "let the ladder offload: set BRIMFUL_SCRATCH_DIR" in out.remedy


def test_a_refusal_names_the_sizer_and_its_ladder(no_limit):
    brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes + 1000)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 20)
    assert "recomputes or offloads what a single row saves" in brimful.explain(caught.value).remedy


def test_what_is_no_error_is_refused():
    with pytest.raises(TypeError, match=r"\(type: int\)"):
        brimful.explain(7)


def net():
    return torch.nn.Embedding(10, 4)


def look_up(layer, tokens):
    return layer(tokens)  # the line to be named


def line_of(function):
    return f"test_errors.py:{function.__code__.co_firstlineno + 1} in {function.__name__}"


def test_the_ring_names_line_and_index_of_an_embedding():
    layer, tokens = net(), torch.tensor([3, 10])
    with pytest.raises(IndexError) as caught, brimful.op_ring() as ring:
        look_up(layer, tokens)
    expected = f"{line_of(look_up)}: aten::embedding got index 10, allowed are 0 to 9"
    assert ring.index_findings()[0] == expected
    out = brimful.explain(caught.value)
    assert (out.kind, out.is_memory, out.cause) == ("index", False, expected)
    assert any("aten::embedding" in record.name for record in ring.records())
    # The same on a device that no longer answers: its message says nothing, the ring does.
    out = brimful.explain(RuntimeError("CUDA error: device-side assert triggered"))
    assert (out.kind, out.cause) == ("index", expected)
    _C._clear_op_ring()


def test_a_label_that_is_too_large_is_found():
    with pytest.raises(IndexError), brimful.op_ring() as ring:
        F.cross_entropy(torch.randn(2, 3), torch.tensor([0, 3]))
    assert "cross_entropy_loss got index 3, allowed are 0 to 2" in ring.index_findings()[0]
    _C._clear_op_ring()


def test_a_ring_that_ended_well_leaves_no_false_evidence():
    with brimful.op_ring():
        look_up(net(), torch.tensor([3]))
    assert _C._op_ring_records() == []
    assert "operator" not in str(brimful.explain(RuntimeError("device-side assert triggered")))


def test_two_rings_at_once_are_refused_and_the_first_goes_on():
    ring = brimful.op_ring()
    ring.start()
    try:
        with pytest.raises(ValueError, match="being recorded already"), brimful.op_ring():
            pass
        torch.ones(1)
        assert ring.records()
    finally:
        ring.stop()
        ring.stop()
    _C._clear_op_ring()


def test_backward_has_the_forward_line():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ZeroDivisionError), brimful.op_ring() as ring:
        x.exp().sum().backward()
        raise ZeroDivisionError
    nodes = [record for record in ring.records() if record.backward and "Exp" in record.name]
    assert nodes and all("test_errors.py:" in record.where for record in nodes)
    _C._clear_op_ring()


def test_recording_and_reading_in_threads_never_waits_for_another():
    done = threading.Event()

    def work():
        while not done.is_set():
            look_up(net(), torch.tensor([1, 2]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    with brimful.op_ring() as ring:
        for thread in threads:
            thread.start()
        for _ in range(200):
            ring.records()
            ring.index_findings()
        done.set()
        for thread in threads:
            thread.join()
    assert ring.records() == []
