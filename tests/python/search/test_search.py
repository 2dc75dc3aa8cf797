"""Trials that run out of memory, without Ray and Optuna (tests/integrations has them)."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
import types

import pytest
import torch
from torch import nn

import brimful
from brimful import memory, search

pytestmark = pytest.mark.alone
MIB = 1 << 20
LIMIT = 24 * MIB
FITS, TOO_LARGE = 64, 4096


@pytest.fixture(autouse=True)
def _quietly(no_limit, one_thread):
    pass


def build(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 10))
    batch = torch.randn(config["batch_size"], 64), torch.randint(10, (config["batch_size"],))
    return model, batch, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train(config, steps=2):
    model, batch, loss_fn, optimizer = build(config)
    sizer = brimful.BatchSizer(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        outcome = sizer.step(batch, loss_fn)
        optimizer.step()
    return {"loss": outcome.loss}


def train_plainly(config):
    model, batch, loss_fn, optimizer = build(config)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


def guarded(train_fn=train, on_oom="split", **options):
    return search.guard(train_fn, on_oom, metric="loss", limit=LIMIT, **options)


@pytest.mark.parametrize("batch_size, pieces", [(FITS, 1), (TOO_LARGE, 3)])
def test_split_keeps_the_batch_of_the_trial(batch_size, pieces):
    whole = train({"batch_size": batch_size})
    result = guarded()({"batch_size": batch_size})
    assert result["oom"] == 0
    assert result["effective_batch"] == batch_size
    assert result["pieces"] >= pieces
    assert 0 < result["peak_bytes"] <= LIMIT
    assert result["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_accumulated_steps_are_one_batch():
    def accumulate(config):
        model, batch, loss_fn, optimizer = build(config)
        sizer = brimful.BatchSizer(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            for k in range(3):
                sizer.step(batch, loss_fn, accumulate=k > 0)
            optimizer.step()
        return {"loss": 0.0}

    assert guarded(accumulate)({"batch_size": FITS})["effective_batch"] == 3 * FITS


def test_report_ends_a_trial_before_its_first_step(caplog):
    stepped = []

    def count(config):
        result = train(config)
        stepped.append(config["batch_size"])
        return result

    run = guarded(count, "report")
    assert run({"batch_size": FITS})["oom"] == 0
    result = run({"batch_size": TOO_LARGE})
    assert stepped == [FITS]
    assert result["oom"] == 1 and result["loss"] == math.inf
    assert result["effective_batch"] == result["pieces"] == 0
    assert result["peak_bytes"] > LIMIT
    assert "memory would run out" in result["oom_message"]
    assert "cannot win" in caplog.text


def test_report_does_not_let_a_batch_be_split_that_no_plan_predicted(monkeypatch):
    monkeypatch.setattr(brimful.BatchSizer, "plan", lambda *_, **__: None)
    result = guarded(on_oom="report")({"batch_size": TOO_LARGE})
    assert result["oom"] == 1 and "was to run whole" in result["oom_message"]
    assert guarded(on_oom="report")({"batch_size": FITS})["oom"] == 0


@pytest.mark.parametrize("on_oom", ["split", "report"])
def test_a_loop_without_a_sizer_is_reported(on_oom, caplog):
    result = guarded(train_plainly, on_oom, mode="max")({"batch_size": TOO_LARGE})
    assert result["oom"] == 1 and result["loss"] == -math.inf
    assert 0 < result["peak_bytes"] <= LIMIT
    assert ("no brimful.BatchSizer stepped" in caplog.text) == (on_oom == "split")
    assert guarded(train_plainly, on_oom)({"batch_size": FITS})["oom"] == 0


def test_a_model_that_no_split_saves_is_reported_before_a_step():
    held = memory.stats("cpu").used_bytes  # by other tests in this process
    limit = held + int(1.5 * MIB)  # batch and parameters, but not momentum and gradients
    result = search.guard(train, metric="loss", limit=limit)({"batch_size": TOO_LARGE})
    assert result["oom"] == 1 and result["effective_batch"] == 0
    assert "the optimizer's step would run out of memory" in result["oom_message"]
    assert "no brimful.BatchSizer" not in result["oom_message"]


def test_raise_passes_the_error_on():
    with pytest.raises(torch.OutOfMemoryError, match="CPU out of memory"):
        guarded(train_plainly, "raise")({"batch_size": TOO_LARGE})
    assert guarded(on_oom="raise")({"batch_size": TOO_LARGE})["oom"] == 0  # its sizer splits


@pytest.mark.parametrize("on_oom", ["split", "report", "raise"])
def test_what_is_no_shortage_is_passed_on(on_oom):
    def fail(config):
        raise RuntimeError("no such column")

    with pytest.raises(RuntimeError, match="no such column"):
        guarded(fail, on_oom)({"batch_size": FITS})


def test_a_shortage_in_disguise_is_one():
    def fail(config):
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
        )

    assert guarded(fail)({"batch_size": FITS})["oom"] == 1


def test_a_trial_leaves_nothing_to_the_next():
    memory.set_limit("cpu", 1 << 40)
    seen = []
    before = memory.stats("cpu").used_bytes
    for train_fn, on_oom in itertools.product((train, train_plainly), ("split", "report")):
        result = guarded(train_fn, on_oom)({"batch_size": TOO_LARGE})
        assert result["oom"] == 0 or memory.stats("cpu").used_bytes == before
        assert memory.stats("cpu").limit_bytes == 1 << 40
        assert search.facts() == {}
    guarded()({"batch_size": FITS})  # its sizer and its optimizer hold each other
    guarded(lambda config: seen.append(memory.stats("cpu").used_bytes))({})
    assert seen == [before]


def test_a_trial_knows_its_facts_while_it_runs():
    def look(config):
        train(config)
        return {"loss": 1.0, "pieces": -1, "seen": search.facts()}

    result = guarded(look)({"batch_size": TOO_LARGE})
    assert result["seen"]["effective_batch"] == TOO_LARGE
    assert result["pieces"] == -1  # its own


def test_peaks_decide_before_the_function_is_called():
    called = []
    run = search.guard(
        called.append, "report", metric="loss", limit=LIMIT, peaks={FITS: MIB, TOO_LARGE: 30 * MIB}
    )
    assert run({"batch_size": TOO_LARGE}) | {"oom_message": ""} == {
        "oom": 1,
        "effective_batch": 0,
        "pieces": 0,
        "peak_bytes": 30 * MIB,
        "oom_message": "",
        "loss": math.inf,
    }
    assert called == []
    run({"batch_size": FITS})
    assert called == [{"batch_size": FITS}]
    split = search.guard(called.append, metric="loss", limit=LIMIT, peaks={TOO_LARGE: 30 * MIB})
    split({"batch_size": TOO_LARGE})
    assert len(called) == 2


def test_a_probe_predicts_the_peak_and_asks_once():
    asked = []

    def counted(config):
        asked.append(config)
        return build(config)

    peaks = search.probe(counted)
    memory.set_limit("cpu", memory.stats("cpu").used_bytes + LIMIT)  # the probe looks beyond it
    for batch_size in (FITS, TOO_LARGE, FITS):
        config = {"batch_size": batch_size}
        told = peaks(config)
        measured = search.guard(train_plainly, metric="loss", limit=1 << 40)(config)["peak_bytes"]
        assert told == pytest.approx(measured - memory.stats("cpu").used_bytes, rel=0.02)
    assert [config["batch_size"] for config in asked] == [FITS, TOO_LARGE]
    assert memory.stats("cpu").limit_bytes is not None


def test_limits_are_bytes_fractions_or_the_systems(monkeypatch):
    def limit_of(limit):
        seen = []
        search.guard(
            lambda config: seen.append(memory.stats("cpu").limit_bytes), metric="loss", limit=limit
        )({})
        return seen[0]

    assert limit_of(LIMIT) == LIMIT
    assert limit_of(None) is None
    system = memory.system_limit().limit_bytes
    assert limit_of("auto") == pytest.approx(system, rel=0.5)
    assert limit_of(0.25) == pytest.approx(system / 4, rel=0.5)


def test_fractions_are_rounded_up_and_at_most_whole():
    assert search.fraction(1, 3, 1) == 0.3334
    assert search.fraction(1, 4, 1) == 0.25
    assert search.fraction(1, 4, 1.5) == 0.375
    assert search.fraction(5, 4, 1) == 1.0
    hundredths = range(101)
    assert [search.fraction(k << 30, 100 << 30, 1) for k in hundredths] == [
        k / 100 for k in hundredths
    ]


@pytest.fixture
def ray_tune(monkeypatch):
    """As much of Ray as `resources` and `guard` use."""
    tune = types.SimpleNamespace(
        PlacementGroupFactory=lambda bundles: types.SimpleNamespace(required_resources=bundles[0])
    )
    tune.get_context = lambda: types.SimpleNamespace(get_trial_resources=lambda: tune.given)
    tune.given = None
    monkeypatch.setitem(sys.modules, "ray.tune", tune)
    return tune


def test_resources_are_by_trial_and_a_trial_too_large_is_alone(ray_tune, caplog):
    context = search.CUDA_CONTEXT_BYTES
    peaks = {1: 2 * context, 2: 4 * context, 3: 9 * context, 4: 10 * context}
    needs = search.resources(peaks, 1.0, total_bytes=10 * context, cpus=0.5)
    found = [needs({"batch_size": k}).required_resources for k in (1, 2, 3, 4)]
    assert [need["GPU"] for need in found] == [0.3, 0.5, 1.0, 1.0]
    assert all(need["CPU"] == 0.5 for need in found)
    assert caplog.text.count("more than a GPU") == 1
    on_cpu = search.resources(lambda config: 100, 1.1, device="cpu")
    assert on_cpu({}).required_resources == {"CPU": 1, "memory": 111}


def test_the_trial_keeps_to_the_memory_that_ray_counts(ray_tune):
    run = search.guard(train_plainly, metric="loss")
    assert run({"batch_size": TOO_LARGE})["oom"] == 0
    ray_tune.given = search.resources(lambda _: LIMIT, 1.0, device="cpu")({})
    assert run({"batch_size": TOO_LARGE})["oom"] == 1
    assert run({"batch_size": FITS})["oom"] == 0
    assert memory.stats("cpu").limit_bytes is None


@pytest.mark.gpu
def test_the_trial_keeps_to_its_fraction_of_a_gpu(ray_tune):
    total = torch.cuda.mem_get_info()[1]
    ray_tune.given = search.resources(lambda _: 2 << 30, 1.0, total_bytes=total)({})

    def greedy(config):
        torch.empty(config["bytes"], dtype=torch.uint8, device="cuda")
        return {"loss": 0.0}

    run = search.guard(greedy, metric="loss")
    assert run({"bytes": 1 << 30})["oom"] == 0
    assert run({"bytes": 4 << 30})["oom"] == 1
    ray_tune.given = None
    assert run({"bytes": 4 << 30})["oom"] == 0


@pytest.fixture
def on_cuda(monkeypatch):
    """`train` on the device, which has only CUDA's own of this process; no limit after the test."""
    torch.zeros(1, device="cuda")
    monkeypatch.setitem(globals(), "build", functools.partial(cuda_of, build))
    yield
    memory.set_limit("cuda", None)


def cuda_of(build, config):
    model, batch, loss_fn, _ = build(config)
    optimizer = torch.optim.SGD(model.cuda().parameters(), lr=0.1, momentum=0.9)
    return model, tuple(t.cuda() for t in batch), loss_fn, optimizer


@pytest.mark.gpu
def test_on_cuda_a_trial_that_would_run_out_ends_before_its_first_step(on_cuda):
    search._clean()
    ooms = memory.stats("cuda").ooms
    limit = memory.stats("cuda").reserved_bytes + 40 * MIB
    run = search.guard(train, "report", metric="loss", limit=limit, device="cuda")
    assert run({"batch_size": FITS})["oom"] == 0
    result = run({"batch_size": TOO_LARGE})
    assert (result["oom"], result["effective_batch"]) == (1, 0)
    assert result["peak_bytes"] > limit
    assert "memory would run out" in result["oom_message"]
    assert memory.stats("cuda").ooms == ooms


@pytest.mark.gpu
def test_on_cuda_without_a_limit_a_trial_that_would_run_out_ends_before_its_first_step(on_cuda):
    search._clean()
    held = torch.empty(torch.cuda.mem_get_info()[0] - 40 * MIB, dtype=torch.uint8, device="cuda")
    ooms = memory.stats("cuda").ooms
    run = search.guard(train, "report", metric="loss", device="cuda")
    assert run({"batch_size": FITS})["oom"] == 0
    result = run({"batch_size": TOO_LARGE})
    assert (result["oom"], result["effective_batch"]) == (1, 0)
    assert "memory would run out" in result["oom_message"]
    assert memory.stats("cuda").ooms == ooms
    assert search.guard(train, metric="loss", device="cuda")({"batch_size": TOO_LARGE})["oom"] == 0
    assert held.is_cuda


@pytest.mark.gpu
def test_on_cuda_resources_are_for_what_a_trial_reserves(on_cuda, ray_tune):
    total = torch.cuda.mem_get_info()[1]
    peaks = search.probe(build)
    needs = search.resources(peaks, 1.0, total_bytes=total)
    for batch_size in (FITS, TOO_LARGE):
        config = {"batch_size": batch_size}
        told = peaks(config)
        share = (told + search.CUDA_CONTEXT_BYTES) / total
        assert needs(config).required_resources["GPU"] == pytest.approx(share, abs=1e-4)
        search._clean()
        before = memory.stats("cuda").reserved_bytes
        torch.cuda.reset_peak_memory_stats()
        train_plainly(config)
        assert told == pytest.approx(torch.cuda.max_memory_reserved() - before, rel=0.1)


def build_there(config):
    """The batch is made on the GPU: one of its size takes minutes on the host, which may have less memory."""
    rows = config["batch_size"]
    x = torch.zeros(rows, 64, device="cuda")
    y = torch.zeros(rows, dtype=torch.long, device="cuda")
    model, _, loss_fn, optimizer = build({"batch_size": 2})
    return model, (x, y), loss_fn, optimizer


@pytest.mark.gpu
def test_on_cuda_a_config_larger_than_the_gpu_gets_one_to_itself(on_cuda, ray_tune, caplog):
    free, total = torch.cuda.mem_get_info()
    rows = free // (1024 * 4 * 2)  # of which the hidden layer alone takes half, forward
    needs = search.resources(search.probe(build_there), 1.0, total_bytes=total)
    found = needs(
        {"batch_size": 2 * rows}
    ).required_resources  # it lies on the GPU, and fits in pieces
    assert found["GPU"] == 1.0
    assert caplog.text.count("more than a GPU") == 1
    found = needs(
        {"batch_size": total // (64 * 4) + 1}
    ).required_resources  # not even the batch does
    assert found["GPU"] == 1.0
    assert caplog.text.count("more than a GPU") == 2


@pytest.mark.gpu
def test_on_cuda_a_batch_that_is_no_piece_is_run_for_what_it_reserves(on_cuda):
    """Two rows are too few for a law."""
    train_plainly({"batch_size": 2})  # what is made once
    told = search.probe(build)({"batch_size": 2})
    search._clean()
    before = memory.stats("cuda").reserved_bytes
    torch.cuda.reset_peak_memory_stats()
    train_plainly({"batch_size": 2})
    assert told == torch.cuda.max_memory_reserved() - before


def test_a_batch_of_two_rows_has_the_peak_of_one_of_three():
    """Without what was there before it; the limit does not matter."""
    held = torch.zeros(8 * MIB, dtype=torch.uint8)
    memory.set_limit("cpu", memory.stats("cpu").used_bytes + 1 * MIB)
    told = {rows: search.probe(build)({"batch_size": rows}) for rows in (2, 3)}
    assert told[2] == pytest.approx(told[3], rel=0.05)
    assert held.nbytes == 8 * MIB


def trial(number=0, **attributes):
    return types.SimpleNamespace(number=number, user_attrs=attributes)


def test_the_constraint_is_above_zero_for_what_did_not_fit():
    constraint = search.memory_constraint(100)
    assert constraint(trial(oom=0, peak_bytes=50)) == (-0.5,)
    assert constraint(trial(oom=0, peak_bytes=100)) == (0.0,)
    assert constraint(trial(oom=0, peak_bytes=150)) == (0.5,)
    assert constraint(trial(oom=1, peak_bytes=150)) == (0.5,)
    assert constraint(trial(oom=1, peak_bytes=90))[0] > 0
    with pytest.raises(ValueError, match=r"no peak_bytes \(trial: 7\)"):
        constraint(trial(7))
    with pytest.raises(ValueError, match="limit_bytes: 0"):
        search.memory_constraint(0)


def test_waiting_ends_when_there_is_room(monkeypatch):
    free = iter([10, 10, 30])
    monkeypatch.setattr(search, "_free_and_total", lambda device: (next(free), 100))
    search.wait_for_memory(20, 10, interval_s=0)
    assert list(free) == []
    monkeypatch.undo()
    search.wait_for_memory(1, device="cpu")


def test_waiting_has_an_end():
    with pytest.raises(
        TimeoutError, match=r"cpu has too little .* free after 0\.01 s .*brimful top"
    ):
        search.wait_for_memory(1 << 60, 0.01, device="cpu", interval_s=0.001)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(
        ImportError, match=r"^ray\.tune is not installed; run: pip install 'brimful\[ray\]'$"
    ):
        search.resources({1: 1}, total_bytes=1)


def test_bad_input_is_named(ray_tune):
    for fn in (1, nn.Linear, lambda config: (yield)):
        with pytest.raises(TypeError, match="must be a function"):
            search.guard(fn, metric="loss")
    with pytest.raises(
        ValueError, match=r"no such on_oom \(on_oom: 'shrink'\).*split, report, raise"
    ):
        search.guard(train, "shrink")
    with pytest.raises(ValueError, match="no such mode"):
        search.guard(train, mode="best")
    for limit in (1.5, 0.0):
        with pytest.raises(ValueError, match=rf"at most 1 \(limit: {limit}\)"):
            search.guard(train, limit=limit)
    with pytest.raises(ValueError, match=r"needs a metric .*metric: None"):
        search.guard(train)({"batch_size": 1})
    with pytest.raises(TypeError, match="Ray Tune config or an Optuna trial"):
        search.guard(train, metric="loss")(7)
    with pytest.raises(ValueError, match=r"headroom: 0\.5"):
        search.resources({}, 0.5, total_bytes=1)
    with pytest.raises(ValueError, match="total_bytes: 0"):
        search.fraction(1, 0)


def test_a_search_space_without_the_key_is_named(ray_tune):
    needs = search.resources({64: 1}, total_bytes=1 << 40)
    with pytest.raises(ValueError, match=r"key: 'batch_size', space: \['lr', 'width'\].*by key="):
        needs({"lr": 1, "width": 2})
    with pytest.raises(ValueError, match=r"no peak is known .*batch_size: 128, known: \[64\]"):
        needs({"batch_size": 128})
    with pytest.raises(ValueError, match="key: 'batch_size'"):
        search.guard(train, "report", metric="loss", peaks={64: 1})({"lr": 1})


def test_without_a_gpu_its_size_is_asked_for(ray_tune, monkeypatch):
    monkeypatch.setattr(search, "gpus", lambda: {"gpus": []})
    with pytest.raises(ValueError, match="pass total_bytes"):
        search.resources({1: 1})


def test_search_imports_neither_ray_nor_optuna():
    code = "import sys, brimful; brimful.search.guard; print({'ray', 'optuna'} & set(sys.modules))"
    done = __import__("subprocess").run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_shortages_are_logged_by_brimful(caplog):
    with caplog.at_level(logging.WARNING, logger="brimful"):
        guarded(train_plainly)({"batch_size": TOO_LARGE})
    assert [record.name for record in caplog.records] == ["brimful"]
