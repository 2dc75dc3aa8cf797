"""The benchmark harness: what it writes when all is well, and when something is not."""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import common, intervals, ranks, run  # noqa: E402
from benchmarks.reducer import bench, cases, worker  # noqa: E402

FIELDS = {"id", "value", "low", "high", "unit", "peer", "rounds", "quick", "torch", "cpu"}
FIELDS |= {"conditions"}

STAND_INS = """
import time
from torch.nn.parallel import DistributedDataParallel
from benchmarks.reducer import cases

class Wrong(DistributedDataParallel):
    def forward(self, x):
        return super().forward(x) * 1.01

def torch_itself(module):
    return DistributedDataParallel(module)

def wrong(module):
    return Wrong(module)

def hang(module):
    time.sleep(3600)

def die(module):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

def raises(module):
    raise RuntimeError("planted")

def peer_breaks(module):
    def fail(module, flags):
        raise RuntimeError("planted in the peer")
    cases.make_torch = fail
    return DistributedDataParallel(module)
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Makes `stand_ins:<function>` importable here and in the ranks."""
    (tmp_path / "stand_ins.py").write_text(STAND_INS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "stand_ins:"


@pytest.fixture
def tiny(monkeypatch):
    """Makes every reducer benchmark small enough for a test."""
    model = cases.Model(layers=3, width=8, batch=2, bias=False)
    for figure_id, spec in bench.SPECS.items():
        small = dataclasses.replace(spec, model=model, quick_rounds=3)
        monkeypatch.setitem(bench.SPECS, figure_id, small)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_one(tmp_path, ours, *more):
    """Runs the smallest figure with `ours` in our place; returns the status and its line."""
    out = tmp_path / "out.json"
    only = "reducer.small_params_w1"
    status = run.main(["--only", only, "--quick", "--json", str(out), "--ours", ours, *more])
    (line,) = read_lines(out)
    assert line["id"] == only
    return status, line


def samples(**wall_ms):
    """One rank's samples, in which every round takes the same time."""
    wall = {name: [value * 1e-3] * 5 for name, value in wall_ms.items()}
    return worker.Samples(wall_s=wall, cpu_s=wall, parameters=6, gradient_bytes=24)


STEADY = {
    cases.BARE: 10,
    cases.BARE_AGAIN: 10,
    cases.OURS_CASE: 12,
    cases.OURS_AGAIN: 12,
    "torch:default": 20,
    "torch:view": 18,
}


class TestIntervals:
    def test_median_of_even_count_is_the_middle(self):
        assert intervals.median([1, 2, 4, 100]) == 3

    def test_ratio_lies_in_its_interval(self):
        ours = [1.0, 1.2, 0.9, 1.1, 1.05, 0.97, 1.3]
        found = intervals.median_ratio(ours, [2.0] * 7)
        assert found.low <= found.value <= found.high
        assert found.value == pytest.approx(1.05 / 2)

    def test_drift_common_to_a_round_cancels(self):
        drift = [10.0 * k for k in range(1, 31)]
        found = intervals.overhead_ratio(
            [d + 1 for d in drift], [d + 4 for d in drift], list(drift)
        )
        assert (found.low, found.value, found.high) == pytest.approx((0.25, 0.25, 0.25))

    def test_interval_narrows_with_rounds(self):
        pattern = [0.9, 1.1, 1.0, 0.95, 1.05]
        few = intervals.median_ratio(pattern, [1.0] * 5)
        many = intervals.median_ratio(pattern * 20, [1.0] * 100)
        assert many.high - many.low < few.high - few.low

    def test_same_samples_give_the_same_interval(self):
        ours, peer = [1.0, 1.5, 1.2], [2.0, 2.1, 1.9]
        assert intervals.median_ratio(ours, peer) == intervals.median_ratio(ours, peer)

    def test_overhead_of_a_peer_within_the_noise_is_not_resolved(self):
        with pytest.raises(intervals.NotResolved, match="not above the noise"):
            intervals.overhead_ratio([2.0] * 6, [0.9, 1.1] * 3, [1.0] * 6)

    def test_covers_the_truth_about_as_often_as_it_says(self):
        import random

        source = random.Random(3)
        inside = 0
        for _ in range(60):
            ours = [source.gauss(1.0, 0.1) for _ in range(30)]
            found = intervals.median_ratio(ours, [1.0] * 30)
            inside += found.low <= 1.0 <= found.high
        assert inside >= 50

    @pytest.mark.parametrize("ours, peer", [([], []), ([1.0], [1.0, 2.0])])
    def test_rounds_that_do_not_pair_are_refused(self, ours, peer):
        with pytest.raises(ValueError, match="pair up"):
            intervals.median_ratio(ours, peer)


class TestIds:
    def test_every_reducer_benchmark_is_listed_and_no_other(self):
        assert set(bench.SPECS) == {name for name in common.load_ids() if name[:8] == "reducer."}

    def test_every_id_belongs_to_a_subsystem_with_benchmarks(self):
        for name in common.load_ids():
            subsystem = name.split(".")[0]
            assert subsystem in run.SUBSYSTEMS
            assert run._has_benchmarks(subsystem)

    @pytest.mark.parametrize(
        "name, entry",
        [
            ("plain", {"unit": "ratio", "better": "lower", "target": 1}),
            ("a.b", {"unit": "furlong", "better": "lower", "target": 1}),
            ("a.b", {"unit": "ratio", "better": "sideways", "target": 1}),
            ("a.b", {"unit": "ratio", "better": "lower", "target": "1"}),
            ("a.b", {"unit": "ratio", "better": "lower"}),
        ],
    )
    def test_malformed_entry_is_refused(self, tmp_path, name, entry):
        path = tmp_path / "ids.json"
        path.write_text(json.dumps({name: entry}))
        with pytest.raises(ValueError):
            common.load_ids(path)


GOOD = common.Figure("a.b", "ratio", 0.5, 0.4, 0.6, "torch", 15)
GOOD_IDS = {"a.b": common.Id("ratio", "lower", 0.6)}


class TestFigure:
    def test_a_good_one_passes(self):
        common.check_figure(GOOD, GOOD_IDS)

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"id": "a.c"}, "not in ids.json"),
            ({"unit": "s"}, "unit differs"),
            ({"low": 0.55}, "outside its interval"),
            ({"high": math.inf}, "finite"),
            ({"value": math.nan}, "finite"),
            ({"low": None}, "finite"),
            ({"value": None}, "needs a reason"),
            ({"value": None, "reason": "because"}, "no interval"),
            ({"reason": "because"}, "no reason"),
            ({"rounds": 0}, "at least one round"),
            ({"peer": None}, "needs its peer"),
        ],
    )
    def test_a_bad_one_is_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            common.check_figure(dataclasses.replace(GOOD, **change), GOOD_IDS)

    @pytest.mark.parametrize(
        "value, better, expected",
        [
            (0.5, "lower", "pass"),
            (0.7, "lower", "miss"),
            (0.5, "higher", "miss"),
            (None, "lower", "not measured"),
        ],
    )
    def test_verdict(self, value, better, expected):
        figure = dataclasses.replace(GOOD, value=value, low=value, high=value)
        assert common.verdict(figure, common.Id("ratio", better, 0.6)) == expected

    def test_small_difference_is_judged_by_cpu_time_over_enough_rounds(self):
        cpu = {"cpu_time": {"value": 0.9, "low": 0.89, "high": 0.91}}
        entry = common.Id("ratio", "lower", 0.97)
        close = dataclasses.replace(GOOD, value=0.98, low=0.9, high=1.1, conditions=cpu)
        assert common.verdict(close, entry).startswith("open")
        assert common.verdict(dataclasses.replace(close, rounds=30), entry).startswith(
            "pass by CPU time 0.900"
        )

    def test_only_reported_has_no_verdict(self):
        assert common.verdict(GOOD, common.Id("ratio", "lower", None)) == "reported"


class TestReducerFigure:
    small_w1 = "reducer.small_params_w1"

    def evaluate(self, by_rank, figure_id=small_w1):
        conditions = {"value": "ratio of overheads"}
        return bench.evaluate(figure_id, bench.SPECS[figure_id], 5, by_rank, conditions)

    def test_overhead_is_taken_against_the_best_of_torch(self):
        figure = self.evaluate([samples(**STEADY)])
        assert figure.peer == "torch:view"
        assert figure.value == pytest.approx((12 - 10) / (18 - 10))
        assert figure.conditions["a_a"]["value"] == pytest.approx(1)
        assert figure.conditions["cases"]["torch:default"]["wall_s"] == pytest.approx(0.020)

    def test_step_lasts_as_long_as_its_slowest_rank(self):
        slow = {**STEADY, cases.OURS_CASE: 27}
        bounds = {"bound:copy": 3, "bound:all_reduce": 4}
        both = [samples(**STEADY, **bounds), samples(**slow, **bounds)]
        figure = self.evaluate(both, "reducer.wide_w2")
        assert figure.value == pytest.approx(27 / 18)
        assert figure.conditions["bound"]["sum_s"] == pytest.approx(0.017)
        assert figure.conditions["bound"]["max_s"] == pytest.approx(0.010)
        assert figure.conditions["cpu_time"]["value"] == pytest.approx((12 + 27) / 2 / 18)

    def test_failed_peer_is_never_replaced_by_the_next(self):
        broken = samples(**STEADY)
        broken.failed_peers["batched"] = "RuntimeError: no"
        figure = self.evaluate([broken])
        assert (figure.value, figure.peer) == (None, None)
        assert "torch:batched failed on rank 0" in figure.reason

    def test_wrong_gradient_on_any_rank_voids_the_figure(self):
        wrong = samples(**STEADY)
        wrong.wrong[cases.OURS_CASE] = "gradient of parameter 2: missing"
        figure = self.evaluate([samples(**STEADY), wrong], "reducer.small_params_w2")
        assert figure.value is None
        assert "on rank 1: gradient of parameter 2: missing" in figure.reason

    def test_peer_as_fast_as_the_bare_module_is_not_measured(self):
        figure = self.evaluate([samples(**{**STEADY, "torch:view": 10})])
        assert figure.value is None
        assert "noise" in figure.reason

    def test_order_of_a_round_rotates_through_all_cases(self):
        names = ["a", "b", "c", "d"]
        orders = [worker._order(names, k) for k in range(8)]
        assert all(sorted(order) == names for order in orders)
        assert {order[0] for order in orders} == set(names)

    def test_flags_that_this_torch_lacks_are_named(self, monkeypatch):
        monkeypatch.setitem(cases.TORCH_FLAGS, "new", {"flag_of_the_future": True})
        present, absent = cases.torch_flags()
        assert "new" not in present
        assert "flag_of_the_future" in absent
        assert {"default", "view", "static+view"} <= set(present)


class TestRun:
    def test_every_figure_is_written_as_ids_json_has_it(self, tmp_path, stand_ins, tiny, capsys):
        out = tmp_path / "out.json"
        run.main(["reducer", "--quick", "--json", str(out), "--ours", stand_ins + "torch_itself"])
        ids = common.load_ids()
        lines = {line["id"]: line for line in read_lines(out)}
        assert set(lines) == set(bench.SPECS)
        for name, line in lines.items():
            assert set(line) >= FIELDS
            assert line["unit"] == ids[name].unit
            assert line["quick"] is True
            assert line["conditions"]["ours"] == "stand_ins:torch_itself"
            if line["value"] is None:  # an overhead of so small a model can drown in the noise
                assert "noise" in line["reason"]
            else:
                assert line["low"] <= line["value"] <= line["high"]
                assert line["peer"].startswith("torch:")
        assert lines["reducer.wide_w2"]["value"] is not None
        printed = capsys.readouterr().out
        assert "<= 0.97" in printed and "quick" in printed

    def test_hang_is_ended_and_named(self, tmp_path, stand_ins, tiny):
        began = time.monotonic()
        status, line = run_one(tmp_path, stand_ins + "hang", "--stall-s", "6")
        assert (status, line["value"]) == (1, None)
        assert "no rank made progress for 6 s" in line["reason"]
        assert time.monotonic() - began < 30

    @pytest.mark.parametrize(
        "ours, reason",
        [
            ("raises", "rank 0: RuntimeError: planted"),
            ("die", "rank 0: killed by SIGKILL"),
            ("wrong", "brimful differs from torch:default"),
            ("peer_breaks", "RuntimeError: planted in the peer"),
        ],
    )
    def test_failure_becomes_a_reason(self, tmp_path, stand_ins, tiny, ours, reason):
        status, line = run_one(tmp_path, stand_ins + ours)
        assert (status, line["value"], line["peer"]) == (1, None, None)
        assert reason in line["reason"]

    def test_failure_of_the_benchmark_itself_becomes_a_reason(self, tmp_path, monkeypatch):
        def figures(quick, only):
            raise KeyError("lost")
            yield

        monkeypatch.setattr(bench, "figures", figures)
        out = tmp_path / "out.json"
        assert run.main(["reducer", "--json", str(out)]) == 1
        lines = read_lines(out)
        assert {line["id"] for line in lines} == set(bench.SPECS)
        assert all("KeyError: 'lost'" in line["reason"] for line in lines)

    def test_figure_that_is_not_yielded_is_not_forgotten(self, tmp_path, monkeypatch):
        monkeypatch.setattr(bench, "figures", lambda quick, only: iter(()))
        out = tmp_path / "out.json"
        assert run.main(["reducer", "--json", str(out)]) == 1
        assert len(read_lines(out)) == len(bench.SPECS)

    def test_subsystem_without_benchmarks_says_so(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(run, "_has_benchmarks", lambda subsystem: False)
        assert run.main(["pipeline"]) == 1
        assert "pipeline has no benchmarks yet" in capsys.readouterr().out
        assert run.main([]) == 0

    def test_unknown_names_are_refused(self, capsys):
        with pytest.raises(SystemExit):
            run.main(["reduced"])
        assert run.main(["--only", "reducer.nothing"]) == 1
        assert "reducer.nothing" in capsys.readouterr().out


def report_rank(rank, world_size, progress, factor):
    progress()
    return rank * factor


def fail_on_rank_1(rank, world_size, progress):
    import torch.distributed

    if rank == 1:
        raise ValueError("planted on 1")
    torch.distributed.barrier()


class TestRanks:
    def test_results_come_in_the_order_of_ranks(self):
        assert ranks.run_ranks(2, report_rank, 10, stall_s=30) == [0, 10]

    def test_error_of_one_rank_ends_all(self):
        began = time.monotonic()
        with pytest.raises(ranks.RanksFailed, match="rank 1: ValueError: planted on 1"):
            ranks.run_ranks(2, fail_on_rank_1, stall_s=60)
        assert time.monotonic() - began < 30
