"""`make gpu`, every part at a reduced scale on the simulated device: so it is known to work before there is a GPU."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import gpu_marks
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from benchmarks.cuda import checks as figures, device, suites  # noqa: E402
from tools.gpu import (  # noqa: E402
    __main__ as command,
    big_models,
    catalogue,
    install,
    race,
    racer,
    results,
    runner,
    schedule,
    steps,
)
from tools.gpu.catalogue import BY_NAME, PARTS, Part  # noqa: E402
from tools.gpu.check import Check, check, skipped  # noqa: E402
from tools.gpu.device import SIMULATED  # noqa: E402
from tools.gpu.parts import tests as tests_part  # noqa: E402

HERE = {"device": "Simulated GPU", "simulated": True}
# What only hardware can say, or is another part's.
SKIPPED = {"kernels": "no kernels of its own", "sanitizer": "needs a real GPU"}


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_the_command_finds_nothing_bad_on_the_simulated_device(tmp_path):
    if not SIMULATED:
        pytest.skip("on a GPU its parts are run by make gpu itself")
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu", "--out", tmp_path / "out.jsonl", "--beside", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    found = lines(tmp_path)
    assert {line["part"] for line in found} == {part.name for part in catalogue.parts(small=True)}
    for name, words in SKIPPED.items():
        (only,) = [line for line in found if line["part"] == name and line["check"]]
        assert only["outcome"] == "skipped" and words in only["words"]
    assert "GPT-2 fp32: peak" in done.stdout
    assert (tmp_path / "logs" / "nccl.log").exists()


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_all_that_a_gpu_is_asked_is_answered_on_the_simulated_device(tmp_path):
    if not SIMULATED:
        pytest.skip("on a GPU tools/gpu/ask.sh asks it all")

    def asked(*options):
        done = subprocess.run(
            [ROOT / "tools/gpu/ask.sh", tmp_path, "--only", "ddp", "--only", "steps", *options],
            env={**os.environ, "PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    asked()
    races = [json.loads(line) for line in (tmp_path / "ddp.jsonl").open()]
    assert [race["case"] for race in races] == list(racer.SMALL_CASES)[:1]
    for found in races:
        assert set(found["median_ms"]) == set(race.wrappers())
        assert found["profile"]["bare"]["issued"] == 0
        assert found["profile"]["torch"]["issued"] == sum(
            found["profile"]["torch"]["collectives"].values()
        )
        assert found["profile"]["brimful"]["issued"] > 0
        assert {"peer", "value", "step"} <= set(found["overhead"]["brimful"])
    recorded = json.loads(gzip.decompress((tmp_path / "steps.json.gz").read_bytes()))
    assert set(recorded["allocators"]) == {"default", "expandable_segments"}
    for allocator, cases in recorded["allocators"].items():
        for entries in cases.values():
            for entry in entries:
                replayed(entry, allocator)
            assert "optimizer" in entries[0]["first_step"]["phases"]
    assert "ddp," not in asked() and "steps," not in asked()  # nothing is left


RECORDED = sorted((ROOT / "tools/gpu/recorded").glob("*.steps.json.gz"))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name)
def test_what_a_gpu_has_answered_is_whole(file):
    recorded = json.loads(gzip.decompress(file.read_bytes()))
    assert not recorded["machine"]["simulated"]
    assert set(recorded["allocators"]) == {"default", "expandable_segments"}
    for allocator, cases in recorded["allocators"].items():
        assert set(cases) == set(steps.CASES)
        for name, entries in cases.items():
            assert tuple(entry["rows"] for entry in entries) == steps.CASES[name].rows
            for entry in entries:
                replayed(entry, allocator)


def replayed(entry, allocator):
    """The events come near the peak that torch reported, which has what blocks are larger than requests."""
    live, peak = 0, 0
    taken = []
    for kind, value in entry["events"]:
        if kind == "a":
            taken.append(-(-value // 512) * 512)
            live += taken[-1]
        else:
            taken.append(0)
            live -= taken[value] if kind == "f" else 0
        peak = max(peak, live)
    assert peak <= entry["peak_over_base"] <= 1.05 * peak + (1 << 20)
    assert list(entry["phases"].values()) == sorted(entry["phases"].values())
    assert ("operators" in entry) == (allocator == "default")


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """parts(name=body): parts whose modules are these functions' bodies; they need neither torch nor a device."""

    def make(limit_s=30, alone=(), **bodies):
        made = [Part(name, name, "a test's", limit_s, alone=name in alone) for name in bodies]
        for name, body in bodies.items():
            text = "from tools.gpu.check import check, skipped\ndef run(small):\n    " + body
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(catalogue, "parts", lambda small=False: made)
        return made

    site = f"import tools.gpu.parts; tools.gpu.parts.__path__ = [{str(tmp_path)!r}]"
    (tmp_path / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(command, "find_machine", lambda wheel, again: dict(HERE))
    return make


GOOD, BAD = 'yield check("one", True)', 'yield check("one", False, "two is not one")'


def run(tmp_path, *arguments):
    return command.main(["--out", str(tmp_path / "out.jsonl"), *arguments])


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_the_exit_status_says_what_failed(parts, tmp_path, capsys):
    parts(good=GOOD, left_out='yield skipped("one", "no tool")')
    assert run(tmp_path) == 0
    parts(good=GOOD, bad=BAD)
    assert run(tmp_path) == command.BAD
    parts(dies="yield check('one', True); import os; os.abort()", good=GOOD)
    assert run(tmp_path) == command.ENDED
    parts(bad=BAD, dies="import os; os._exit(3); yield")
    assert run(tmp_path) == command.BAD + command.ENDED
    told = capsys.readouterr().out
    assert "no tool" in told and "two is not one" in told
    assert "ended by SIGABRT" in told and "exit status 3" in told


def test_a_part_that_dies_keeps_what_it_found_and_ends_alone(parts, tmp_path):
    parts(dies="yield check('one', True, 'kept', 7.0); import os; os.abort()", good=GOOD)
    run(tmp_path)
    first, second, of_part, good, of_good = lines(tmp_path)
    assert (first["check"], first["value"], second["outcome"]) == ("one", 7.0, "ended")
    assert (of_part["part"], of_part["outcome"]) == ("dies", "ended")
    assert (good["outcome"], of_good["outcome"]) == ("ok", "ok")
    assert of_good["machine"] == HERE


def test_an_error_of_a_part_is_bad_with_its_message(parts, tmp_path):
    parts(raises="raise KeyError('lost'); yield")
    assert run(tmp_path) == command.BAD
    assert "KeyError: 'lost'" in lines(tmp_path)[0]["words"]


def test_a_part_that_hangs_is_ended_with_its_children(parts, tmp_path):
    body = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(60)']); print('hangs', flush=True); time.sleep(60); yield"
    )
    (part,) = parts(limit_s=3, hangs=body)
    began = time.monotonic()
    checks, _ = runner.run_part(part, small=True)
    assert time.monotonic() - began < 20
    assert "not done in 3 s" in checks[-1].words and "hangs" in checks[-1].words


def test_what_is_left_is_resumed_and_what_was_killed_runs_again(parts, tmp_path, capsys):
    marker = tmp_path / "marker"
    count = f"from pathlib import Path; p = Path({str(marker)!r}); p.open('a').write('x'); "
    parts(first=count + GOOD, second=BAD)
    assert run(tmp_path, "--part", "first") == 0
    with (tmp_path / "out.jsonl").open("a") as file:  # a run that was killed in the second part
        file.write('{"part": "second", "check": "one", "outcome": "ok"}\n{"part": "sec')
        file.write("\n")
    assert run(tmp_path, "--resume") == command.BAD
    assert marker.read_text() == "x"
    assert run(tmp_path, "--resume", "--minutes", "0.01") == command.BAD
    assert marker.read_text() == "x"
    assert run(tmp_path, "--minutes", "0.01") == command.LEFT
    assert "left for --resume: first, second" in capsys.readouterr().out


def test_results_of_another_machine_are_not_resumed(parts, tmp_path, monkeypatch):
    parts(first=GOOD)
    assert run(tmp_path) == 0
    monkeypatch.setattr(command, "find_machine", lambda *_: {**HERE, "device": "another"})
    assert run(tmp_path, "--resume", "--minutes", "0.01") == command.LEFT


def test_without_a_device_nothing_is_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(install, "machine", lambda: '{"device": null, "torch": "2.11"}')
    assert run(tmp_path) == command.NOTHING
    assert "no CUDA device" in capsys.readouterr().out
    monkeypatch.setattr(install, "machine", lambda: None)
    monkeypatch.setattr(install, "install", lambda wheel: "cmake is missing")
    assert run(tmp_path) == command.NOTHING
    assert "cmake is missing" in capsys.readouterr().out
    monkeypatch.setattr(install, "machine", lambda: json.dumps({**HERE}))
    assert run(tmp_path, "--install") == command.NOTHING
    assert run(tmp_path, "--minutes", "0.01") == command.LEFT


def test_parts_run_beside_each_other_and_those_that_time_run_alone(parts, tmp_path):
    meets = "import time; from pathlib import Path; "
    write, wait = (
        f"Path({str(tmp_path)!r}, 'IT').write_text('')",
        f"[time.sleep(0.02) for _ in range(500) if not Path({str(tmp_path)!r}, 'IT').exists()]",
    )
    one = meets + write.replace("IT", "a") + "; " + wait.replace("IT", "b") + "; "
    two = meets + write.replace("IT", "b") + "; " + wait.replace("IT", "a") + "; "
    seen = f'yield check("both", sorted(p.name for p in Path({str(tmp_path)!r}).glob("[ab]")) == ["a", "b"])'
    times = meets + f"[p.unlink() for p in Path({str(tmp_path)!r}).glob('[ab]')]; " + GOOD
    parts(times=times, alone=("times",), one=one + seen, two=two + seen)
    assert run(tmp_path, "--beside", "2") == 0
    of_parts = [line["part"] for line in lines(tmp_path) if line["check"] == ""]
    assert sorted(of_parts[:2]) == ["one", "two"] and of_parts[2] == "times"


def test_what_an_interrupt_ends_does_not_go_on(parts, tmp_path):
    marker = tmp_path / "went on"
    body = f"import time; time.sleep(5); open({str(marker)!r}, 'w'); yield"
    made = parts(hangs=body, hangs_too=body, good="yield check('one', True)")
    done = schedule.run(made, schedule.Ways(3, small=True), schedule.Clock(None))
    assert next(done).part.name == "good"
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        done.throw(KeyboardInterrupt)
    assert time.monotonic() - began < 4
    time.sleep(max(0.0, 5.5 - (time.monotonic() - began)))
    assert not marker.exists()
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


@pytest.mark.parametrize("free_gib, most", [(0, 1), (7, 1), (13, 2), (139, 23)])
def test_as_many_parts_run_beside_each_other_as_the_device_has_room_for(
    free_gib, most, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert schedule.beside(free_gib << 30) == most
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert schedule.beside(free_gib << 30) == min(most, 3)


def test_each_file_with_tests_for_a_gpu_is_a_part_of_its_own():
    files = catalogue.test_files()
    assert set(catalogue.SMALL_TESTS) <= set(files)
    made = {
        part.environment[catalogue.TEST_FILE]: part
        for part in catalogue.parts()
        if part not in PARTS
    }
    assert list(made) == files
    assert made["sizer/test_cuda.py"].alone and not made["fleet/test_fleet_nccl.py"].alone
    assert made["sizer/test_cuda.py"].name == "tests/sizer/test_cuda"


def test_the_parts_are_listed_and_none_takes_more_than_four_minutes(capsys):
    assert run(Path("/nonexistent"), "--list") == 0
    told = capsys.readouterr().out
    assert all(part.name in told for part in catalogue.parts())
    assert max(part.limit_s for part in catalogue.parts()) <= 240


@pytest.mark.parametrize(
    "outcomes, whole",
    [(["ok", "skipped"], "ok"), (["skipped"], "skipped"), (["ok", "bad", "ended"], "ended")],
)
def test_a_part_is_as_good_as_its_worst_check(outcomes, whole):
    assert results.outcome_of([Check("one", outcome) for outcome in outcomes]) == whole


def test_failures_and_skips_of_pytest_are_reported(tmp_path):
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="right"/>'
        '<testcase classname="a" name="wrong"><failure message="1 is 2">...</failure></testcase>'
        '<testcase classname="a" name="left"><skipped message="needs two"/></testcase>'
        "</testsuite></testsuites>"
    )
    whole, wrong, left = tests_part.checks_of(file)
    assert (whole.outcome, whole.value) == ("bad", 1)
    assert wrong == check("a.wrong", False, "1 is 2")
    assert left == skipped("a.left", "needs two")
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="left"><skipped message="needs two"/>'
        "</testcase></testsuite></testsuites>"
    )
    assert [found.outcome for found in tests_part.checks_of(file)] == ["skipped", "skipped"]
    file.write_text("<testsuites><testsuite/></testsuites>")
    assert [found.outcome for found in tests_part.checks_of(file)] == ["bad"]


def test_the_large_models_have_their_sizes():
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in model.parameters())
            for model in (big_models.resnet50(), big_models.Gpt())
        ]
    assert sizes == [25_557_032, 124_439_808]


@pytest.fixture
def reported(monkeypatch):
    """reported(part=checks): what the parts find, on a simulated device."""
    here = device.Device("simulated", True, {"LD_PRELOAD": "x"})
    monkeypatch.setattr(figures, "device", lambda: here)

    def report(**parts):
        ran = []

        def run_part(part, small):
            ran.append((part.name, part.environment))
            return parts[part.name], 1.0

        monkeypatch.setattr(figures, "run_part", run_part)
        found = {figure.id: figure for figure in figures.measure(quick=True)}
        for figure in found.values():
            common.check_figure(figure, common.load_ids())
        for name, environment in ran:
            assert environment == {"LD_PRELOAD": "x", **BY_NAME[name].environment}
        return found

    return report


def test_figures_are_what_the_parts_find(reported):
    def oom(left):
        return [
            check("AMP: bytes at entry", left == 0, "", left),
            check("retry bytes", False, "", left),
        ]

    steady = [check("shortages", False, "", 3, steps=60)]
    found = reported(steady=steady, oom=oom(0), oom_expandable=oom(512), oom_async=oom(0))
    assert (found["cuda.steady_ooms"].value, found["cuda.steady_ooms"].rounds) == (3, 60)
    assert found["cuda.retry_bytes"].value == 512
    forecast = found["cuda.forecast_worst"]
    assert (forecast.value, forecast.reason) == (None, common.NEEDS_CUDA)


def test_a_part_that_ended_or_retried_nothing_is_no_figure(reported):
    nothing = [
        check("AMP: bytes at entry", False, "0 retries", 0),
        check("retry bytes", True, "", 0),
    ]
    found = reported(
        steady=[Check("part", "ended", "not done in 120 s")],
        oom=nothing,
        oom_expandable=nothing,
        oom_async=nothing,
    )
    assert "not done in 120 s" in found["cuda.steady_ooms"].reason
    assert "0 retries" in found["cuda.retry_bytes"].reason


def test_without_any_device_the_figures_say_so(monkeypatch):
    for module in (figures, suites):
        monkeypatch.setattr(module, "device", lambda: None)
        found = list(module.measure(quick=True))
        assert {figure.id for figure in found} == set(module.IDS)
        assert all(figure.reason == common.NEEDS_CUDA for figure in found)


def test_tests_that_fail_are_counted_and_named(monkeypatch):
    here = device.Device("simulated", True, {})
    for what, bad in ((["-k", "as_its_worst_check"], 0), (["-k", "none_of_these"], None)):
        figure = suites._tests("cuda.op_bad", here, [*what, __file__], {})
        common.check_figure(figure, common.load_ids())
        assert figure.value == bad
    assert "did not run" in figure.reason


class Collected:
    """As much of pytest's item as gpu_marks asks for."""

    def __init__(self, file, name):
        self.path, self.name, self.markers = gpu_marks.FAILS_ON_A_GPU.parent / file, name, []

    def get_closest_marker(self, name):
        return name if name == "gpu" else None

    def add_marker(self, marker):
        self.markers.append(marker.mark)


def test_what_fails_on_a_gpu_is_expected_there_and_nowhere_else(tmp_path, monkeypatch):
    known = tmp_path / "fails.txt"
    known.write_text(
        "# a comment\nany  sizer/test_a.py::test_b[0.7]  its forecast is short\n"
        "1.0  sizer/test_a.py::test_b[1]  of another torch\n"
    )
    monkeypatch.setattr(gpu_marks, "FAILS_ON_A_GPU", known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for simulated, expected in ((False, [("xfail", "its forecast is short", True)]), (True, [])):
        monkeypatch.setattr(gpu_marks, "SIMULATED", simulated)
        items = [
            Collected("sizer/test_a.py", "test_b[0.7]"),
            Collected("sizer/test_a.py", "test_b[1]"),
        ]
        gpu_marks.mark(items)
        found, others = (item.markers for item in items)
        assert [(m.name, m.kwargs["reason"], m.kwargs["strict"]) for m in found] == expected
        assert others == []


def test_what_fails_on_a_gpu_is_there_and_marked_gpu():
    known = gpu_marks.known_failures()
    for name in known:
        file, test = name.split("::")
        text = (ROOT / "tests/python" / file).read_text()
        assert f"def {test.split('[')[0]}(" in text and "mark.gpu" in text, name
