"""The benchmark harness: a figure is right, or it is null with its reason."""

import argparse
import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path

import numpy
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import common, intervals, run
from benchmarks.fleet import simulate
from benchmarks.ladder import plans, sweep as ladder_sweep
from benchmarks.reducer import bench, cases, control_record, report, rounds, steps
from benchmarks.sizer import models, sweep, trials

STAND_INS = """
import os, signal, time
from torch.nn.parallel import DistributedDataParallel
from benchmarks.reducer import cases

class Wrong(DistributedDataParallel):
    def forward(self, x):
        return super().forward(x) * 1.01

def itself(module, **options):
    import brimful
    return brimful.DistributedDataParallel(module)

def wrong(module):
    return Wrong(module)

def hang(module):
    time.sleep(3600)

def die(module):
    os.kill(os.getpid(), signal.SIGKILL)

def peer_breaks(module):
    def fail(module, case):
        raise RuntimeError("planted in the peer" + " 0.123" * 10000)
    cases.make_torch = fail
    return DistributedDataParallel(module)
"""


class TestIntervals:
    def test_drift_common_to_a_round_cancels(self):
        drift = [10.0 * k for k in range(1, 31)]
        found = intervals.overhead_ratio([d + 1 for d in drift], [d + 4 for d in drift], drift)
        assert (found.low, found.value, found.high) == pytest.approx((0.25, 0.25, 0.25))

    def test_overhead_of_a_peer_within_the_noise_is_not_resolved(self):
        with pytest.raises(intervals.NotResolved, match="not above the noise"):
            intervals.overhead_ratio([2.0] * 6, [0.9, 1.1] * 3, [1.0] * 6)

    @pytest.mark.parametrize("ours, peer", [([], []), ([1.0], [1.0, 2.0])])
    def test_rounds_that_do_not_pair_are_refused(self, ours, peer):
        with pytest.raises(ValueError, match="pair up"):
            intervals.median_ratio(ours, peer)


class TestIds:
    @pytest.mark.parametrize("subsystem", run.SUBSYSTEMS)
    def test_every_benchmark_is_listed_and_no_other(self, subsystem):
        module = importlib.import_module(f"benchmarks.{subsystem}.bench")
        if subsystem == "reducer":
            measured = [name for benchmark in module.benchmarks() for name in benchmark.ids]
        elif subsystem == "pipeline":
            measured = [name for names in module.MODULES.values() for name in names]
        else:
            measured = [name for part in module.MODULES for name in part.IDS]
        assert sorted(measured) == sorted(
            name for name in common.load_ids() if name.startswith(run.prefix_of(subsystem) + ".")
        )

    @pytest.mark.parametrize("subsystem", run.SUBSYSTEMS)
    def test_a_figure_is_found_by_its_id_alone(self, subsystem, monkeypatch, capsys):
        asked = []
        monkeypatch.setattr(run, "_run", lambda name, *_: asked.append(name) or [])
        figure = next(
            name for name in common.load_ids() if name.startswith(run.prefix_of(subsystem) + ".")
        )
        assert run.main(["--only", figure]) == 0
        assert asked == [subsystem]


GOOD = common.Figure("a.b", "ratio", 0.5, 0.4, 0.6, "torch", 15)
GOOD_IDS = {"a.b": common.Id("ratio", "lower", 0.6)}


class TestFigure:
    @pytest.mark.parametrize(
        "change, message",
        [
            ({"id": "a.c"}, "not in ids.json"),
            ({"low": 0.55}, "outside its interval"),
            ({"value": math.nan}, "finite"),
            ({"value": None}, "needs a reason"),
            ({"reason": "because"}, "no reason"),
            ({"peer": None}, "needs its peer"),
        ],
    )
    def test_a_bad_one_is_refused(self, change, message):
        common.check_figure(GOOD, GOOD_IDS)
        with pytest.raises(ValueError, match=message):
            common.check_figure(dataclasses.replace(GOOD, **change), GOOD_IDS)


STEADY = {cases.BARE: 10, cases.BARE_AGAIN: 10, cases.OURS_CASE: 12, cases.OURS_AGAIN: 12}
STEADY |= {"torch:default": 20, "torch:view": 18}


def evaluate(figure_id, *by_rank):
    return steps.evaluate(figure_id, steps.SPECS[figure_id], 5, by_rank, {"value": "ratio"})


def samples(**wall_ms):
    """One rank's samples, in which every round takes the same time."""
    wall = {name: [value * 1e-3] * 5 for name, value in {**STEADY, **wall_ms}.items()}
    return rounds.Samples(wall_s=wall, cpu_s=wall, parameters=6, gradient_bytes=24)


class TestReducerFigure:
    def test_overhead_is_taken_against_the_best_of_torch(self):
        figure = evaluate("reducer.small_params_w1", samples())
        assert (figure.peer, figure.value) == ("torch:view", pytest.approx((12 - 10) / (18 - 10)))

    def test_step_lasts_as_long_as_its_slowest_rank(self):
        bounds = {"bound:copy": 3, "bound:all_reduce": 4}
        slow = samples(**bounds, **{cases.OURS_CASE: 27})
        assert evaluate("reducer.wide_w2", samples(**bounds), slow).value == pytest.approx(27 / 18)

    def test_failed_peer_and_wrong_gradient_void_it(self):
        broken, wrong = samples(), samples()
        broken.failed_peers["batched"] = "RuntimeError: no"
        wrong.wrong[cases.OURS_CASE] = "differs from torch:default: gradient 2 is missing"
        for bad, reason in (
            (broken, "torch:batched failed on"),
            (wrong, "rank 1: brimful differs"),
        ):
            figure = evaluate("reducer.small_params_w2", samples(), bad)
            assert figure.value is None and reason in figure.reason


PROFILE = """positions: line
summary: 1000

fn=brimful::Engine::launch(long)
0 40
cfn=brimful::Tail::write(int)
calls=2 0
0 100
"""


def test_instructions_called_from_a_counted_function_count_once():
    profiles = {"bare": "summary: 600\n", "brimful": PROFILE}
    assert control_record.evaluate(profiles, 2, {}).value == 100 / 1000
    profiles["brimful"] = PROFILE.replace("brimful::", "renamed::")
    with pytest.raises(report.Unmeasured, match="none of brimful::Tail::"):
        control_record.evaluate(profiles, 2, {})


@pytest.mark.parametrize(
    "ours, value, reason",
    [
        ("itself", True, ""),
        ("wrong", None, "brimful differs from torch:default"),
        ("die", None, "rank 0: killed by SIGKILL"),
        ("hang", None, "no rank made progress for 6 s"),
        ("peer_breaks", None, "RuntimeError: planted in the peer"),
    ],
)
def test_a_run_ends_in_a_figure_or_its_reason(tmp_path, monkeypatch, ours, value, reason):
    (tmp_path / "stand_ins.py").write_text(STAND_INS)
    monkeypatch.syspath_prepend(str(tmp_path))  # for the ranks too
    monkeypatch.setattr(cases, "settle_steps", lambda module: 2)
    small = cases.Model(layers=3, width=64, batch=64, bias=False)
    spec = dataclasses.replace(steps.SPECS["reducer.wide_w2"], model=small, quick_rounds=3)
    monkeypatch.setitem(steps.SPECS, "reducer.wide_w2", spec)
    out = tmp_path / "out.json"
    options = [
        "--quick",
        "--json",
        str(out),
        "--ours",
        "stand_ins:" + ours,
        "--stall-s",
        "6" if ours == "hang" else "60",
    ]
    run.main(["--only", "reducer.wide_w2", *options])
    line = json.loads(out.read_text())
    assert (line["value"] is None) == (value is None), line
    assert reason in line.get("reason", "") and len(line.get("reason", "")) <= common.MAX_REASON


def test_what_is_not_measured_is_written_with_its_reason(tmp_path, monkeypatch, capsys):
    def fail(quick, only):
        raise KeyError("lost")

    out = tmp_path / "out.json"
    for figures, reason in ((fail, "KeyError: 'lost'"), (lambda quick, only: iter(()), "")):
        monkeypatch.setattr(bench, "figures", figures)
        assert run.main(["reducer", "--json", str(out)]) == 1
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(lines) == len([name for name in common.load_ids() if name[:8] == "reducer."])
        assert all(line["value"] is None and reason in line["reason"] for line in lines)
    assert run.main(["--only", "reducer.nothing"]) == 1
    assert "reducer.nothing" in capsys.readouterr().out


def test_a_figure_is_of_the_subsystem_whose_ids_begin_so():
    only = argparse.Namespace(subsystems=[], only=["device.ops", "reducer.wide_w2"])
    assert run._subsystems(only) == ["reducer", "device_model"]


def test_a_fault_that_ends_badly_is_found(monkeypatch, no_limit):
    monkeypatch.setattr(
        models, "CASES", {"MLP": dataclasses.replace(models.CASES["MLP"], rows=600)}
    )
    (figure,) = sweep.measure(quick=True)
    assert (figure.value, figure.conditions["bad"]) == (0, [])
    monkeypatch.setattr(trials.Result, "differs_from", lambda *_: "random numbers differ")
    (figure,) = sweep.measure(quick=True)
    assert figure.value > 0 and "random numbers differ" in figure.conditions["bad"][0]


def test_a_step_on_a_rung_that_ends_otherwise_is_found(monkeypatch, no_limit):
    monkeypatch.setattr(ladder_sweep, "RUNGS", {"recompute": "parts recomputed"})
    (found,) = ladder_sweep._sweep("MLP", 2).values()
    assert (found.faults, found.retried, found.bad) == ({"recompute": 2}, 2, [])
    monkeypatch.setattr(trials.Result, "differs_from", lambda *_: "random numbers differ")
    (found,) = ladder_sweep._sweep("MLP", 2).values()
    assert len(found.bad) == 2


def test_all_plans_of_a_small_model_are_listed_once():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    _, modules = plans.recorded(model, torch.randn(2, 4))
    listed = [plans.describe(plans.named(modules, plan)) for plan in plans.every(modules)]
    assert len(listed) == len(set(listed)) == 3 * 3 + 2 + 1


def test_the_simulation_is_of_the_rule_and_of_what_failures_cost():
    alike = simulate.Speeds(spread=0, jitter=0, throttled=0)
    immortal = simulate.Failures(mtbf_h=1e12)
    row = simulate.simulate(8, alike, immortal, steps=20)
    assert row.even == row.shares == 1
    assert row.shares_restart == row.shares_regroup == pytest.approx(1)
    throttled = simulate.Speeds(spread=0, jitter=0, throttled=0.5, throttled_steps=1e12)
    even, shares = simulate.step_efficiency(64, throttled, seed=0, steps=100)
    assert even == pytest.approx(0.8, abs=0.05)  # half of them, or so, need 1.5 times as long
    assert 0.96 < shares < 1  # but for the first steps
    random = numpy.random.default_rng(0)
    for detect_s in (1, 600):  # what a failure costs, of which there are about ten a day
        failures = simulate.Failures(mtbf_h=156, host_share=0, detect_s=detect_s, away_s=0)
        runs = [simulate.goodput_of_regroups(64, failures, 0, random) for _ in range(10)]
        every = failures.checkpoint_every_s(64)
        lost = (detect_s + failures.heal_s + failures.step_s) * failures.failures_per_s(64)
        busy = every / (every + failures.checkpoint_s)
        assert numpy.mean(runs) == pytest.approx(busy * (1 - lost), rel=0.02)
        restarts = [simulate.goodput_of_restarts(64, failures, random) for _ in range(10)]
        assert numpy.mean(restarts) < numpy.mean(runs) - 0.05
