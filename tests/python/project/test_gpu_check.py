"""`make gpu`, every part at a reduced scale on the simulated device: so it is known to work before there is a GPU."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from benchmarks.cuda import checks as figures, device, suites  # noqa: E402
from tools.gpu import __main__ as command, big_models, install, results, runner  # noqa: E402
from tools.gpu.catalogue import BY_NAME, FOLDERS, PARTS, TESTS, Part  # noqa: E402
from tools.gpu.check import Check, check, skipped  # noqa: E402
from tools.gpu.device import SIMULATED  # noqa: E402
from tools.gpu.parts import tests as tests_part  # noqa: E402

HERE = {"device": "Simulated GPU", "simulated": True}
# What only hardware can say, or is another part's.
SKIPPED = {"kernels": "no kernels of its own", "sanitizer": "needs a real GPU"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [part.name for part in PARTS])
def test_each_part_finds_nothing_bad_on_the_simulated_device(name):
    if not SIMULATED:
        pytest.skip("on a GPU its parts are run by make gpu itself")
    checks, _ = runner.run_part(BY_NAME[name], small=True, limit_s=100)
    assert checks
    bad = [found for found in checks if found.outcome not in ("ok", "skipped")]
    assert not bad, bad
    if name in SKIPPED:
        assert [found.outcome for found in checks] == ["skipped"]
        assert SKIPPED[name] in checks[0].words


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """parts(name=body): parts whose modules are these functions' bodies; they need neither torch nor a device."""

    def make(limit_s=30, **bodies):
        made = [Part(name, name, "a test's", limit_s) for name in bodies]
        for name, body in bodies.items():
            text = "from tools.gpu.check import check, skipped\ndef run(small):\n    " + body
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(command, "PARTS", made)
        monkeypatch.setattr(command, "BY_NAME", {part.name: part for part in made})
        return made

    site = f"import tools.gpu.parts; tools.gpu.parts.__path__ = [{str(tmp_path)!r}]"
    (tmp_path / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(command, "_machine", lambda wheel, again: dict(HERE))
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
    monkeypatch.setattr(command, "_machine", lambda wheel, again: {**HERE, "device": "another"})
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


def test_each_folder_with_tests_for_a_gpu_is_a_part_of_its_own():
    tests = ROOT / "tests" / "python"
    marked = {
        file.relative_to(tests).parts[0]
        for file in tests.glob("*/test_*.py")
        if re.search(r"\bmark\.(real_)?gpu\b", file.read_text())
    }
    assert marked - {"project"} == set(FOLDERS)
    assert set(tests_part.SMALL) == set(FOLDERS)
    for folder in FOLDERS:
        part = BY_NAME[f"tests_{folder}"]
        assert (part.module, part.environment) == ("tests", {TESTS: folder})


def test_the_parts_are_listed_and_none_takes_more_than_eight_minutes(capsys):
    assert run(Path("/nonexistent"), "--list") == 0
    told = capsys.readouterr().out
    assert all(part.name in told for part in PARTS)
    assert max(part.limit_s for part in PARTS) <= 480


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


def test_the_large_models_have_their_sizes():
    import torch

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
