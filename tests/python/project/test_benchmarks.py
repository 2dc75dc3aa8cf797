"""The benchmark harness: what it writes when all is well, and when something is not."""

import dataclasses
import importlib
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import callgrind, common, intervals, ranks, run  # noqa: E402
from benchmarks.cuda import bench as cuda_bench  # noqa: E402
from benchmarks.pipeline import bench as pipeline_bench  # noqa: E402
from benchmarks.probes import bench as probes_bench  # noqa: E402
from benchmarks.reducer import (  # noqa: E402
    bench,
    cases,
    compiled,
    control_record,
    extra_buckets,
    first,
    host_wait,
    planner,
    report,
    rescale,
    rounds,
    steps,
    unused,
)
from benchmarks.sizer import (  # noqa: E402
    bench as sizer_bench,
    models,
    overhead,
    peers,
    predict,
    regrow,
    steady,
    sweep,
    sweep_ranks,
    trials,
)

FIELDS = {"id", "value", "low", "high", "unit", "peer", "rounds", "quick", "torch", "cpu"}
FIELDS |= {"conditions"}

STAND_INS = """
import inspect
import time
from torch.nn.parallel import DistributedDataParallel
from benchmarks.reducer import cases

class Wrong(DistributedDataParallel):
    def forward(self, x):
        return super().forward(x) * 1.01

def make_brimful(wrapper, module, options):
    known = inspect.signature(wrapper).parameters
    return wrapper(module, **{name: v for name, v in options.items() if name in known})

def brimful_itself(module, **options):
    import brimful
    return make_brimful(brimful.DistributedDataParallel, module, options)

def wrong_brimful(module, **options):
    import brimful

    class WrongBrimful(brimful.DistributedDataParallel):
        def forward(self, x):
            return super().forward(x) * 1.01

    return make_brimful(WrongBrimful, module, options)

def wrong(module):
    return Wrong(module)

def hang(module):
    time.sleep(3600)

def die(module):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

def raises(module):
    raise RuntimeError("planted")

def raises_tensors(module):
    raise RuntimeError("planted " + "0.123 " * 10000)

def peer_breaks(module):
    def fail(module, case):
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
    for figure_id, spec in steps.SPECS.items():
        small = dataclasses.replace(spec, model=model, quick_rounds=3)
        monkeypatch.setitem(steps.SPECS, figure_id, small)
    many = cases.Model(layers=12, width=64, batch=4, bias=False)
    case = extra_buckets.Case(many, bucket_mb=1 / 64)
    monkeypatch.setattr(extra_buckets, "CASES", {"small": case})
    biased = dataclasses.replace(model, layers=6, bias=True)
    monkeypatch.setattr(rescale, "MODEL", dataclasses.replace(model, batch=8))
    monkeypatch.setattr(first, "MODEL", dataclasses.replace(model, width=64))
    monkeypatch.setattr(first, "QUICK_WRAPPERS", 1)
    monkeypatch.setattr(unused, "MODEL", biased)
    monkeypatch.setattr(planner, "MODEL", biased)
    monkeypatch.setattr(cases, "settle_steps", lambda module: 2)
    monkeypatch.setattr(compiled, "MODEL", compiled.Transformer(1, 16, 2, 4, 2))
    monkeypatch.setattr(host_wait, "MODEL", model)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_one(tmp_path, ours, *more, only="reducer.small_params_w1"):
    """Runs one figure with `ours` in our place; returns the status and its line."""
    out = tmp_path / "out.json"
    status = run.main(["--only", only, "--quick", "--json", str(out), "--ours", ours, *more])
    (line,) = read_lines(out)
    assert line["id"] == only
    return status, line


def samples(**wall_ms):
    """One rank's samples, in which every round takes the same time."""
    wall = {name: [value * 1e-3] * 5 for name, value in wall_ms.items()}
    return rounds.Samples(wall_s=wall, cpu_s=wall, parameters=6, gradient_bytes=24)


REDUCER_IDS = [figure_id for benchmark in bench.benchmarks() for figure_id in benchmark.ids]
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
        listed = [name for name in common.load_ids() if name.startswith("reducer.")]
        assert sorted(REDUCER_IDS) == sorted(listed)

    def test_every_probes_benchmark_is_listed_and_no_other(self):
        measured = [figure_id for module in probes_bench.MODULES for figure_id in module.IDS]
        assert sorted(measured) == sorted(n for n in common.load_ids() if n.startswith("probes."))

    def test_the_peak_by_category_and_the_share_without_a_line_are_measured(self):
        figures = {
            f.id: f for f in probes_bench.figures(True, ("probes.unsited", "probes.category_bad"))
        }
        assert figures["probes.category_bad"].value == 0
        assert figures["probes.unsited"].value == 0
        assert "_MemRefType.ACT" in str(
            figures["probes.category_bad"].conditions["MLP"]["MemTracker"]
        )

    def test_every_sizer_benchmark_is_listed_and_no_other(self):
        measured = [figure_id for module in sizer_bench.MODULES for figure_id in module.IDS]
        assert sorted(measured) == sorted(n for n in common.load_ids() if n.startswith("sizer."))

    def test_every_pipeline_benchmark_is_listed_and_no_other(self):
        measured = [name for names in pipeline_bench.MODULES.values() for name in names]
        assert sorted(measured) == sorted(n for n in common.load_ids() if n.startswith("pipeline."))
        for module in pipeline_bench.MODULES:
            assert callable(importlib.import_module(f"benchmarks.pipeline.{module}").figures)

    def test_every_cuda_benchmark_is_listed_and_no_other(self):
        measured = [figure_id for module in cuda_bench.MODULES for figure_id in module.IDS]
        assert sorted(measured) == sorted(n for n in common.load_ids() if n.startswith("cuda."))

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
        return steps.evaluate(figure_id, steps.SPECS[figure_id], 5, by_rank, conditions)

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
        wrong.wrong[cases.OURS_CASE] = "differs from torch:default: gradient 2 is missing"
        figure = self.evaluate([samples(**STEADY), wrong], "reducer.small_params_w2")
        assert figure.value is None
        assert "rank 1: brimful differs from torch:default: gradient 2" in figure.reason

    def test_peer_as_fast_as_the_bare_module_is_not_measured(self):
        figure = self.evaluate([samples(**{**STEADY, "torch:view": 10})])
        assert figure.value is None
        assert "noise" in figure.reason

    def test_order_of_a_round_rotates_through_all_cases(self):
        names = ["a", "b", "c", "d"]
        orders = [rounds.order(names, k) for k in range(8)]
        assert all(sorted(order) == names for order in orders)
        assert {order[0] for order in orders} == set(names)

    def test_flags_that_this_torch_lacks_are_named(self, monkeypatch):
        monkeypatch.setitem(cases.TORCH_FLAGS, "new", {"flag_of_the_future": True})
        present, absent = cases.torch_flags()
        assert "new" not in present
        assert "flag_of_the_future" in absent
        assert {"default", "view", "static+view"} <= set(present)

    def test_bytes_on_the_wire_stand_beside_a_bf16_figure(self):
        bounds = {"bound:copy": 3, "bound:all_reduce": 4, cases.FP32_WIRE: 24}
        one = samples(**STEADY, **bounds)
        one.more["wire_bytes"] = 13
        figure = self.evaluate([one, one], "reducer.wide_w2_bf16")
        assert figure.peer == "torch:view"  # never the one on a fp32 wire
        assert figure.conditions["wire"] == {"bytes": 13, "to_fp32": 13 / 24}
        assert figure.conditions["step_to_fp32_wire"]["value"] == pytest.approx(0.5)
        one.more["wire_bytes"] = "ours has no telemetry()"
        figure = self.evaluate([one, one], "reducer.wide_w2_bf16")
        assert figure.conditions["wire"]["reason"] == "ours has no telemetry()"

    def test_bytes_are_those_of_telemetry(self):
        class Wrapped:
            def telemetry(self):
                return {"bytes": 12}

        assert cases.wire_bytes(Wrapped()) == 12
        assert cases.wire_bytes(object()) == "ours has no telemetry()"


class TestGradients:
    one = torch.tensor([1.0, -2.0])

    def test_same_ones_pass(self):
        assert rounds.differences([self.one, None], [self.one.clone(), None]) is None

    @pytest.mark.parametrize(
        "found, message",
        [
            ([one * 1.01, None], "parameter 0: differs by 0.01 of its largest"),
            ([None, None], "parameter 0: missing"),
            ([one, one], "parameter 1: is there"),
            ([one], "has 1 parameters, not 2"),
        ],
    )
    def test_others_are_named(self, found, message):
        assert message in rounds.differences(found, [self.one, None])

    def test_bf16_passes_what_two_roundings_change(self):
        exact = torch.randn(1000)
        half = (exact / 2).bfloat16()
        assert rounds.differences([(half + half).float()], [exact], rounds.BF16) is None
        assert rounds.differences([(half + half).float()], [exact]) is not None

    def test_nothing_to_compare_with_is_an_error(self):
        for reference in ([None], [torch.zeros(2)], [torch.full((2,), math.nan)]):
            with pytest.raises(RuntimeError, match="nothing to compare"):
                rounds.differences([self.one], reference)


class TestUnused:
    model = cases.Model(layers=6, width=8, batch=2, bias=True)

    def test_each_step_and_rank_uses_another_half(self):
        mine, theirs = unused.halves(40, 0, 3), unused.halves(40, 1, 3)
        assert all(sum(used) == 20 for used in mine + theirs)
        assert len({tuple(used) for used in mine + theirs}) == 6

    def test_half_step_computes_the_same_and_keeps_no_gradient_of_a_stand_in(self):
        chain = unused.Chain(self.model)
        x = self.model.data(0)
        expected = chain(x)
        chain.used = [False, True] * 3
        for _ in range(2):
            out = chain(x)
            assert torch.equal(out, expected)
            out.sum().backward()
        assert [layer.weight.grad is not None for layer in chain.layers] == chain.used
        assert all(tensor.requires_grad for pair in chain.stand_ins for tensor in pair)
        assert len(list(chain.parameters())) == 12


class TestOtherFigures:
    def test_too_few_buckets_are_no_figure(self):
        case = extra_buckets.Case(cases.Model(2, 8, 2, False), 1)
        with pytest.raises(report.Unmeasured, match="buckets: 3, needed: 10"):
            extra_buckets._describe("small", case, [extra_buckets.Peaks(buckets=3)])

    def test_extra_buckets_are_counted_from_the_bare_module_of_as_many_pieces(self):
        case = extra_buckets.Case(cases.Model(2, 8, 2, False), 1)
        mib = 2**20
        peaks = {"bare, 1 piece": 5 * mib, "bare, 4 pieces": 4 * mib}
        peaks |= {"set_to_none=True, 1 piece": 6 * mib, "set_to_none=True, 4 pieces": 7 * mib}
        more = {**peaks, "set_to_none=True, 1 piece": 8 * mib}  # the rank that takes more counts
        ranks_peaks = [extra_buckets.Peaks(p, buckets=12) for p in (peaks, more)]
        found = extra_buckets._describe("small", case, ranks_peaks)["extra_buckets"]
        assert found == {"set_to_none=True, 1 piece": 3, "set_to_none=True, 4 pieces": 3}

    def test_peak_is_taken_against_the_default_and_time_against_the_best(self):
        one = first.FirstSamples()
        one.wall_s = {cases.OURS_CASE: [2.0] * 3, cases.OURS_AGAIN: [2.0] * 3}
        one.wall_s |= {"torch:default": [4.0] * 3, "torch:view": [5.0] * 3}
        one.cpu_s = one.wall_s
        one.construct_s = {name: [1.0] * 3 for name in one.wall_s}
        one.construct_peak_bytes = {name: [1] * 3 for name in one.wall_s}
        peaks = {"torch:default": 100, "torch:view": 60}
        one.peak_bytes = {name: [peaks.get(name, 50)] * 3 for name in one.wall_s}
        time_figure, peak_figure = first.evaluate([one, one], 3, {})
        assert (time_figure.value, time_figure.peer) == (0.5, "torch:default")
        assert time_figure.conditions["with_constructor"]["value"] == pytest.approx(3 / 5)
        assert (peak_figure.value, peak_figure.peer) == (0.5, "torch:default")
        assert peak_figure.conditions["leanest"] == "torch:view"
        assert peak_figure.conditions["to_leanest"]["value"] == pytest.approx(50 / 60)

    def test_best_fixed_size_is_chosen_without_the_planner(self):
        wall = {"1 MB": [3.0, 3.0], "5 MB": [2.0, 2.0], planner.AUTO: [1.0, 1.0]}
        assert planner.choose(wall) == "5 MB"

    def test_host_wait_is_what_our_gap_has_above_the_peers(self):
        one = samples(**{**STEADY, "torch:view": 10})
        gaps_ms = dict.fromkeys(STEADY, 0.1) | {cases.OURS_CASE: 0.7, cases.OURS_AGAIN: 0.7}
        one.more[host_wait.GAP] = {name: [gap * 1e-3] * 5 for name, gap in gaps_ms.items()}
        figure = host_wait.evaluate(one, 5, {})
        assert (figure.value, figure.peer) == (pytest.approx(0.6 / 12), "torch:view")
        assert figure.conditions["step_ratio"]["value"] == pytest.approx(12 / 10)
        assert figure.conditions["a_a"]["value"] == pytest.approx(0)
        common.check_figure(figure, common.load_ids())

    def test_fraction_near_zero_is_judged_by_cpu_time(self):
        cpu = {"cpu_time": {"value": 0.2, "low": 0.1, "high": 0.3}}
        figure = common.Figure("a.b", "fraction", 0.01, 0.0, 0.02, "torch", 60, cpu)
        entry = common.Id("fraction", "lower", 0.05)
        assert common.verdict(figure, entry) == "miss by CPU time 0.200 [0.100, 0.300]"
        assert common.verdict(dataclasses.replace(figure, conditions={}), entry) == "pass"


PROFILE = """positions: line
events: Ir
summary: 1000

fn=brimful_bench_step
0 10
cfn=brimful::Reducer::launch(long)
calls=1 0
0 640

fn=brimful::Reducer::launch(long)
0 40
cfn=brimful::Tail::write(int)
calls=2 0
0 100

fn=brimful::Tail::write(int)
0 70
cob=libbrimful.so
cfi=???
cfn=brimful::encode(brimful::ControlRecord const&)
calls=2 0
0 30

fn=brimful::Reducer::finish()
cfn=brimful::Tail::read()
calls=2 0
0 60
cfn=brimful::decode(std::array<unsigned char, 40ul> const&)
calls=2 0
0 40
"""


class TestCallgrind:
    def evaluate(self, ours=PROFILE):
        bare = "summary: 600\n"
        return control_record.evaluate({"bare": bare, "brimful": ours}, 2, {})

    def test_calls_among_the_counted_functions_count_once(self):
        figure = self.evaluate()
        assert figure.value == (100 + 60 + 40) / 1000
        assert figure.conditions["step_instructions"] == {"bare": 300, "brimful": 500}
        above = figure.conditions["instructions_above_bare_per_parameter"]
        assert above == {"brimful": 200 / 800}
        common.check_figure(figure, common.load_ids())

    def test_profile_without_the_control_record_is_no_figure(self):
        with pytest.raises(report.Unmeasured, match="none of brimful::Tail::"):
            self.evaluate(PROFILE.replace("brimful::", "renamed::"))

    @pytest.mark.parametrize(
        "missing, reason",
        [("program", "configure with -DBRIMFUL_BENCHMARKS=ON"), ("valgrind", "not installed")],
    )
    def test_what_is_missing_becomes_the_reason(self, monkeypatch, tmp_path, missing, reason):
        if missing == "program":
            monkeypatch.setattr(control_record, "PROGRAM", "no_such_program")
        else:
            monkeypatch.setattr(callgrind, "find_program", lambda name: tmp_path / name)
            monkeypatch.setattr(callgrind.shutil, "which", lambda name: None)
        (figure,) = bench.figures(quick=True, only=["reducer.control_record"])
        assert figure.value is None
        assert reason in figure.reason

    def test_program_that_fails_is_named(self, monkeypatch, tmp_path):
        fails = tmp_path / "fails"
        fails.write_text("#!/bin/sh\necho planted >&2\nexit 3\n")
        fails.chmod(0o755)
        monkeypatch.setattr(callgrind.shutil, "which", lambda name: str(fails))
        with pytest.raises(callgrind.Unavailable, match="exit status 3: planted"):
            callgrind.profile(fails)


class TestRun:
    @pytest.mark.timeout(400)
    def test_every_figure_is_written_as_ids_json_has_it(self, tmp_path, stand_ins, tiny, capsys):
        out = tmp_path / "out.json"
        ours = stand_ins + "brimful_itself"
        run.main(["reducer", "--quick", "--json", str(out), "--ours", ours])
        ids = common.load_ids()
        lines = {line["id"]: line for line in read_lines(out)}
        assert sorted(lines) == sorted(REDUCER_IDS)
        for name, line in lines.items():
            assert set(line) >= FIELDS
            assert line["unit"] == ids[name].unit
            assert line["quick"] is True
            if name == "reducer.control_record":
                assert "nothing can stand in our place" in line["reason"]
                continue
            assert line["conditions"]["ours"] == ours
            if name == "reducer.host_wait" and not torch.cuda.is_available():
                assert (line["value"], line["reason"]) == (None, "needs a CUDA device")
                continue
            if line["value"] is None:  # an overhead of so small a model can drown in the noise
                assert "noise" in line["reason"]
                assert line["conditions"]["value"] == "ratio of overheads"
            else:
                assert line["low"] <= line["value"] <= line["high"]
                assert line["peer"]
        self.check_conditions(lines)
        printed = capsys.readouterr().out
        assert "<= 0.97" in printed and "quick" in printed

    def check_conditions(self, lines):
        conditions = {name.split(".")[1]: line["conditions"] for name, line in lines.items()}
        assert set(conditions["wide_w2_bf16"]["wire"]) >= {"bytes", "to_fp32"}
        assert "torch:view+python_hook" in conditions["wide_w2"]["cases"]
        (model,) = conditions["extra_buckets"]["models"].values()
        assert model["buckets"] >= extra_buckets.MIN_BUCKETS
        assert max(model["extra_buckets"].values()) <= 2
        # torch without views keeps a second copy of all gradients: 12 buckets, less what bare adds.
        assert model["extra_buckets_of_torch"]["torch:default, 1 piece"] > 10
        assert set(conditions["unused"]["world_sizes"]) == {"1", "2"}
        assert conditions["planner"]["choosing"]["best"] in conditions["planner"]["cases"]
        assert conditions["first_time"]["fresh_wrappers"] == first.QUICK_WRAPPERS
        assert conditions["compile"]["graphs_after_warm_up"] == 0

    @pytest.mark.parametrize(
        "only, case",
        [
            ("wide_w2_bf16", "brimful differs from fp32_wire:torch"),
            ("extra_buckets", "differs from torch:view"),
            ("rescale", "known differs from the weighted mean"),
            ("first_peak", "brimful differs from torch:default"),
            ("unused", "brimful:half differs from torch:find_unused"),
            ("planner", "1 MB differs from torch:default"),
            ("compile", "brimful differs from torch:default"),
        ],
    )
    def test_wrong_gradient_voids_each_figure(self, tmp_path, stand_ins, tiny, only, case):
        ours = stand_ins + "wrong_brimful"
        status, line = run_one(tmp_path, ours, only="reducer." + only)
        assert (status, line["value"]) == (1, None)
        assert case in line["reason"]
        assert "of its largest value" in line["reason"]

    def test_reason_is_short(self, tmp_path, stand_ins, tiny):
        _, line = run_one(tmp_path, stand_ins + "raises_tensors")
        assert line["reason"].startswith("rank 0: RuntimeError: planted 0.123")
        assert len(line["reason"]) <= bench.MAX_REASON

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
        assert {line["id"] for line in lines} == set(REDUCER_IDS)
        assert all("KeyError: 'lost'" in line["reason"] for line in lines)

    def test_figure_that_is_not_yielded_is_not_forgotten(self, tmp_path, monkeypatch):
        monkeypatch.setattr(bench, "figures", lambda quick, only: iter(()))
        out = tmp_path / "out.json"
        assert run.main(["reducer", "--json", str(out)]) == 1
        assert len(read_lines(out)) == len(REDUCER_IDS)

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


@pytest.fixture
def small_sizer(monkeypatch, no_limit):
    """Makes the sizer's benchmarks small enough for a test."""
    mlp = models.CASES["MLP"]
    few = {"MLP": dataclasses.replace(mlp, rows=600), "conv + BN": models.CASES["conv + BN"]}
    monkeypatch.setattr(models, "CASES", few)
    monkeypatch.setattr(regrow, "MODELS", ("MLP",))
    monkeypatch.setattr(sweep_ranks, "QUICK_MODELS", ("MLP",))
    monkeypatch.setattr(sweep_ranks, "QUICK_FAULTS", 2)


def result(**changed):
    clean = trials.Result(split=[2, 2], fired=True, values=[torch.ones(2)], rng=(1,))
    return dataclasses.replace(clean, **changed)


class TestSizerFigures:
    def test_no_fault_ends_badly(self, small_sizer):
        (figure,) = sweep.measure(quick=True)
        common.check_figure(figure, common.load_ids())
        assert (figure.value, figure.conditions["bad"]) == (0, [])
        assert figure.conditions["models"]["conv + BN"]["retried"] >= 3
        assert figure.rounds == figure.conditions["faults"] >= 2 * 2 * sweep.QUICK_FAULTS

    def test_a_limit_under_which_a_step_ends_otherwise_than_a_clean_one_is_found(
        self, small_sizer, monkeypatch
    ):
        found = sweep.Found()
        monkeypatch.setattr(trials.Result, "differs_from", lambda *_: "random numbers differ")
        sweep.sweep_budgets(models.CASES["MLP"], 2, found)
        assert found.fitted >= 1 and len(found.bad) == found.fitted
        assert all("random numbers differ" in words for words in found.bad)

    def test_refusals_are_counted_by_drop_and_after_the_first_plan(self, monkeypatch, no_limit):
        monkeypatch.setattr(models, "CASES", {"MLP": models.CASES["MLP"]})
        planned, dropped = steady.measure(quick=True)
        assert planned.value == 0
        assert 1 <= dropped.value <= 2
        found = dropped.conditions["models"]["MLP"]
        assert len(found) == len(steady.DROPS)
        assert dropped.value == max(
            drop["ooms"] for drops in dropped.conditions["models"].values() for drop in drops
        )

    def test_widths_vary_where_a_model_takes_several(self):
        case = models.CASES["ragged decoder"]
        widths = {case.draw(4).shape[1] for _ in range(100)}
        assert len(widths) > 10 and max(widths) <= case.batch(4).shape[1] == models.LENGTH

    def test_a_prediction_below_the_peak_counts_twice(self):
        assert predict.worst_of([0.001, 0.007]) == 0.007
        assert predict.worst_of([-0.005, 0.007]) == 0.01

    def test_no_fault_on_either_rank_ends_badly(self, small_sizer):
        (figure,) = sweep_ranks.measure(quick=True)
        assert (figure.value, figure.reason) == (0, None)
        assert figure.conditions["bad"] == [] and figure.conditions["faults"] == 2 * 2 * 3

    @pytest.mark.parametrize(
        "change, words",
        [
            ({"rng": (2,)}, "random numbers differ"),
            ({"values": [torch.tensor([1.0, -0.0])]}, "parameters, buffers or optimizer state"),
            ({"held_bytes": 8}, "8 bytes more in use after the step"),
            ({"left_bytes": 64}, "64 bytes left over"),
        ],
    )
    def test_what_a_fault_leaves_behind_is_named(self, change, words):
        clean = result(values=[torch.tensor([1.0, 0.0])])
        assert result(values=[torch.tensor([1.0, 0.0])]).differs_from(clean) is None
        changed = {"values": [torch.tensor([1.0, 0.0])], **change}
        assert words in result(**changed).differs_from(clean)

    def test_a_fault_in_the_optimizer_must_be_a_half_step(self):
        assert sweep.judge_optimizer(result(half_step=True), result()) is None
        assert "no HalfStepError" in sweep.judge_optimizer(result(), result())
        assert "no HalfStepError" in sweep.judge_optimizer(
            result(half_step=True, fired=False), result()
        )
        assert "left over" in sweep.judge_optimizer(result(half_step=True, left_bytes=1), result())

    def test_indices_are_spread_from_end_to_end(self):
        assert trials.indices(5, None) == trials.indices(5, 9) == [0, 1, 2, 3, 4]
        assert trials.indices(101, 3) == [0, 50, 100]

    def test_regrown_batches_are_measured_against_the_oracle(self, small_sizer):
        (figure,) = regrow.measure(quick=True)
        assert figure.value > 0.2 and figure.peer == regrow.ORACLE
        found = figure.conditions["models"]["MLP"]
        assert found[regrow.WITHOUT]["retries"] == [0, 1, 0]
        assert found[regrow.WITH]["retries"] == [0, 0, 0]
        assert found[regrow.WITHOUT]["steps_to_whole"] == 0
        before, cut, restored = found[regrow.ORACLE]
        assert before == restored == 1 and cut > 1

    def test_a_second_retry_or_a_batch_that_stays_split_is_no_figure(self):
        good = {"most_retries_of_a_cut": 1, "steps_to_whole": 3}
        entry = {regrow.WITH: good, regrow.WITHOUT: good}
        assert regrow._broken({"MLP": entry}) is None
        twice = {**entry, regrow.WITHOUT: {**good, "most_retries_of_a_cut": 2}}
        assert "2 retries under one budget" in regrow._broken({"MLP": twice})
        split = {**entry, regrow.WITH: {**good, "steps_to_whole": None}}
        assert "not whole again" in regrow._broken({"MLP": split})

    def test_overhead_is_that_of_the_worse_model(self):
        totals = {"cnn": (1000, 1002), "encoder": (2000, 2010)}
        profiles = {}
        for model, (hand, sizer) in totals.items():
            profiles[model, overhead.HAND] = f"summary: {hand}\n"
            profiles[model, overhead.SIZER] = f"summary: {sizer}\n"
        figure = overhead.evaluate(profiles, 2, {})
        common.check_figure(figure, common.load_ids())
        assert figure.value == pytest.approx(0.005)
        assert figure.conditions["cnn"]["step_instructions"] == {"hand": 500, "sizer": 501}

    def test_peers_find_a_size_and_accelerate_is_asked_for(self, small_sizer, monkeypatch):
        monkeypatch.setitem(sys.modules, "accelerate", None)
        (figure,) = peers.measure(quick=True)
        found = figure.conditions["models"]["MLP"]
        assert found[peers.OURS]["ooms"] == 0
        assert found["predict=False"]["restarts"] == found[peers.HALVING]["restarts"] >= 1
        for way in (peers.OURS, "predict=False", peers.HALVING, "log-log fit", "MemTracker"):
            assert found[way]["gradient_error"] < 1e-5
            assert 0 < found[way]["budget_used"] <= 1
        assert "pip install accelerate" in found["accelerate"]["reason"]
