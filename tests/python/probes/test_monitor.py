"""The monitor's outputs, `brimful top`, `brimful doctor`, and GPUtil's functions, on a made-up driver and on none."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time

import fake_nvml
import pytest

import brimful
from brimful import __main__ as program, gpus, monitor
from brimful.cli import doctor

MIB = 1 << 20


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


def run(*arguments, **environment):
    """What a program says on a machine with this made-up driver."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def driver(library, scenario):
    return {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": scenario}


@pytest.fixture
def machine(library, monkeypatch):
    """machine(scenario): this process sees that driver, from its first look on."""
    monkeypatch.setenv("BRIMFUL_NVML", str(library))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def enter(scenario):
        monkeypatch.setenv("FAKE_NVML", "driver_gone")
        monitor.gpus()  # the next look starts the library again
        monkeypatch.setenv("FAKE_NVML", scenario)

    return enter


READ = (
    "import json; from brimful import monitor; print(json.dumps([monitor.gpus(), monitor.gpus()]))"
)

SCENARIOS = {
    "healthy": (2, "", 80 << 30),
    "mig": (4, "", 80 << 30),
    "not_available": (2, "", 80 << 30),
    "host_pids": (2, "", 80 << 30),
    "hidden_pids": (2, "", 80 << 30),
    "unified": (2, "", None),
    "unified_zero": (2, "", None),
    "lost": (2, "", None),
    "lost_handle": (2, "", None),
    "no_permission": (2, "", None),
    "lost_midway": (2, "", None),
    "mig_silent": (4, "", None),
    "broken_power": (2, "", 80 << 30),
    "huge": (2, "", 80 << 30),
    "long_names": (2, "", 80 << 30),
    "crowd": (2, "", 80 << 30),
    "zero": (0, "no GPU", None),
    "init_failed": (0, "not loaded", None),
    "driver_gone": (0, "went away", None),
    "mismatch": (0, "different versions", None),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_driver_is_read_without_a_crash(machine, scenario):
    machine(scenario)
    count, problem, total = SCENARIOS[scenario]
    report = json.loads(json.dumps(monitor.gpus()))
    assert len(report["gpus"]) == count
    assert problem in report["gpu_problem"]
    if total is not None:
        assert report["gpus"][0]["total_bytes"] == total
    for gpu in report["gpus"]:
        assert gpu["used_bytes"] is None or gpu["used_bytes"] > 0  # no 0 for what is unknown
        assert gpu["busy"] is None or 0 <= gpu["busy"] <= 1
    assert len(gpus.getGPUs()) == sum(gpu["mig_index"] is None for gpu in report["gpus"])
    assert brimful._C._sample_table(-1).startswith("host ")


def test_the_library_is_found_as_the_system_finds_it(library):
    done = run("-c", READ, **driver(library, "healthy"))
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert [gpu["name"] for gpu in first["gpus"]] == ["NVIDIA H100"] * 2
    assert second["gpus"][0]["used_bytes"] == 9 << 30


def test_importing_loads_neither_monitor_nor_gpus():
    code = (
        "import sys, brimful; print({'brimful.gpus', 'brimful.monitor'} & set(sys.modules)); "
        "print(brimful.gpus.getGPUs, brimful.monitor.Monitor)"
    )
    done = run("-c", code)
    assert done.stdout.startswith("set()\n<function getGPUs"), done.stdout + done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = brimful.nonsense


def test_importing_opens_nothing(library):
    code = (
        "import brimful; maps = open('/proc/self/maps').read(); "
        "print('libnvidia-ml' in maps); brimful.monitor.gpus(); "
        "print('libnvidia-ml' in open('/proc/self/maps').read())"
    )
    done = run("-c", code, **driver(library, "healthy"))
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_the_visible_devices_decide_what_cuda_calls_them(machine, monkeypatch):
    machine("healthy")

    def names(variable):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        return [gpu["cuda_index"] for gpu in monitor.gpus()["gpus"]]

    assert names("1,0") == [1, 0]
    assert names("GPU-00000001") == [None, 0]
    assert names("0,0") == [None, None]
    assert names("") == [None, None]
    assert names("7") == [None, None]
    assert "names no GPU" in monitor.gpus()["gpu_problem"]


class Writer:
    def __init__(self, fail=False):
        self.scalars, self.fail = {}, fail

    def add_scalar(self, tag, value, step):
        if self.fail:
            raise OSError("disk full")
        self.scalars.setdefault(tag, []).append((step, value))


def wait_for(watch, count):
    end = time.monotonic() + 60
    while watch.samples < count:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_samples_go_to_all_places(machine, tmp_path):
    machine("healthy")
    writer = Writer()
    lines, text = tmp_path / "samples.jsonl", tmp_path / "brimful.prom"
    with monitor.Monitor(interval_ms=10, json=lines, prometheus=text, writer=writer) as watch:
        wait_for(watch, 3)
    samples = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(samples) == watch.samples >= 3
    assert [s["unix_s"] for s in samples] == sorted(s["unix_s"] for s in samples)
    own = samples[-1]["processes"][0]
    assert own["pid"] == os.getpid() and own["rss_bytes"] > 10 * MIB
    assert samples[-1]["torch"][0]["device"] == "cpu"
    assert samples[-1]["gpus"][0]["used_bytes"] == 9 << 30
    assert 'brimful_gpu_used_bytes{gpu="0",uuid="GPU-00000000-' in text.read_text()
    assert [step for step, _ in writer.scalars["gpu/0/busy"]] == list(range(watch.samples))
    assert writer.scalars["gpu/0/busy"][0][1] == 0.97


def test_a_writer_that_fails_costs_one_warning(machine, caplog, tmp_path):
    machine("init_failed")
    with monitor.Monitor(interval_ms=1, json=tmp_path / "s", writer=Writer(fail=True)) as watch:
        wait_for(watch, 4)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "the monitor writes no more scalars: OSError: disk full" in warnings[0]
    assert len((tmp_path / "s").read_text().splitlines()) == watch.samples


def test_an_unwritable_path_costs_one_warning(caplog, tmp_path):
    with monitor.Monitor(interval_ms=1, prometheus=tmp_path / "no" / "file") as watch:
        wait_for(watch, 3)
    assert [("no more Prometheus" in r.getMessage()) for r in caplog.records] == [True]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"must be positive \(interval_ms: 0\)"):
        monitor.Monitor(interval_ms=0)
    with pytest.raises(AttributeError):
        monitor.Monitor(writer=object())


def test_a_program_ends_with_its_monitor_running():
    code = (
        "import brimful\n"
        "class W:\n"
        "    def add_scalar(self, *a): pass\n"
        "watch = brimful.monitor.Monitor(interval_ms=1, writer=W())\n"
        "kept = [watch]\n"
        "while watch.samples < 3: pass\n"
    )
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.smoke
def test_workers_are_children(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        processes = monitor.sample()["processes"]
        assert child.pid in [process["pid"] for process in processes[1:]]
    finally:
        child.communicate(b"\n")


def test_top_shows_the_table_once(library):
    done = run("-m", "brimful", "top", "--once", **driver(library, "healthy"))
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^0 +0 +NVIDIA H100 +97% +9\.0 GiB +70\.0 GiB +80\.0 GiB +61 C", done.stdout, re.M
    )
    assert "3999999" in done.stdout
    assert "\x1b" not in done.stdout
    none = run("-m", "brimful", "top", "--once", BRIMFUL_NVML="libbrimful-no-such.so")
    assert none.returncode == 0
    assert "no NVIDIA driver here (libbrimful-no-such.so" in none.stdout
    head, *rows = none.stdout.split("\n\n")[-1].splitlines()
    assert head.split() == ["pid", "resident", "process"]
    assert 0 < len(rows) <= 10
    assert any(re.match(r"\d+ +[\d.]+ [KMGT]iB  \S", row) for row in rows)
    everybody = json.loads(
        run("-m", "brimful", "top", "--once", "--json", BRIMFUL_NVML="no-such.so").stdout
    )["processes"]
    assert [p["rss_bytes"] for p in everybody] == sorted(
        (p["rss_bytes"] for p in everybody), reverse=True
    )


def test_top_speaks_json(library):
    done = run("-m", "brimful", "top", "--once", "--json", "--pid", "1", **driver(library, "mig"))
    sample = json.loads(done.stdout)
    assert [gpu["mig_index"] for gpu in sample["gpus"]] == [None, 0, 2, None]
    assert sample["processes"][0]["pid"] == 1


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--pid", "0"], ["--nonsense"]])
def test_top_refuses_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["top", "--once", *arguments])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_the_program_knows_its_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "top" in text and "doctor" in text
    with pytest.raises(SystemExit) as ended:
        program.main(["nonsense"])
    assert ended.value.code == 2


def test_the_doctor_looks_at_everything(machine, capsys, monkeypatch):
    machine("zero")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    status = program.main(["doctor", "--json"])
    lines = json.loads(capsys.readouterr().out)
    names = {line["name"] for line in lines}
    wanted = {"torch", "CUDA", "NCCL", "gloo", "NVML", "host memory", "/dev/shm", "open files"}
    assert wanted <= names and any(name.startswith("port ") for name in names)
    assert all(line["health"] in ("ok", "warn", "fail") for line in lines)
    assert all(line["remedy"] for line in lines if line["health"] != "ok")
    assert next(line for line in lines if line["name"] == "gloo")["health"] == "ok"
    assert status == 1  # a driver without GPUs
    assert next(line for line in lines if line["name"] == "NVML")["health"] == "fail"


def test_the_doctor_is_content_without_a_driver(machine, capsys, monkeypatch):
    monkeypatch.setenv("BRIMFUL_NVML", "libbrimful-no-such.so")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        status = doctor.main([])
    text = capsys.readouterr().out
    assert re.search(rf"^warn  port {port} +in use", text, re.M)
    assert "-> another job may be running" in text
    assert re.search(r"^(warn|ok)  +NVML +no NVIDIA driver here", text, re.M)
    assert bool(re.search("^fail", text, re.M)) == (status == 1)


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    def gloo():
        raise OSError("no interface\nmore")

    monkeypatch.setattr(doctor, "_gloo", gloo)
    found = {finding.name: finding for finding in doctor.findings()}
    assert found["gloo"].health == "fail"
    assert found["gloo"].found == "OSError: no interface"


def test_gputils_names_and_units(machine):
    machine("healthy")
    first, second = gpus.getGPUs()
    assert (first.id, first.load, first.temperature) == (0, 0.97, 61)
    assert (first.memoryTotal, first.memoryUsed, first.memoryFree) == (81920, 9216, 71680)
    assert first.memoryUtil == 9216 / 81920
    assert (first.driver, first.name, first.serial) == ("570.86.10", "NVIDIA H100", "165000000000")
    assert (first.display_mode, first.display_active) == ("Disabled", "Disabled")
    assert first.uuid.startswith("GPU-0000000") and second.id == 1


def test_available_gpus_are_chosen_as_gputil_does(machine):
    machine("healthy")  # GPU 0 is busy
    assert gpus.getAvailable() == [1]
    assert gpus.getAvailable(maxLoad=1, limit=math.inf) == [0, 1]
    assert gpus.getAvailable("last", maxLoad=1, limit=2) == [1, 0]
    assert gpus.getAvailable("load", maxLoad=1, limit=2) == [1, 0]
    assert sorted(gpus.getAvailable("random", maxLoad=1, limit=2)) == [0, 1]
    assert gpus.getAvailable(excludeID=[1]) == []
    assert gpus.getAvailable(excludeUUID=[gpus.getGPUs()[1].uuid]) == []
    assert gpus.getAvailable(maxMemory=0.1) == []
    assert gpus.getAvailable(memoryFree=71680) == [1]
    assert gpus.getAvailable(memoryFree=71681) == []
    assert gpus.getAvailability(gpus.getGPUs()) == [0, 1]
    with pytest.raises(ValueError, match=r"order: fastest"):
        gpus.getAvailable("fastest")
    machine("not_available")
    assert gpus.getAvailable(limit=2) == []  # a load that nobody knows is not low
    assert gpus.getAvailable(limit=2, includeNan=True) == [0, 1]


def test_the_first_available_gpu_or_an_error(machine, monkeypatch, capsys):
    machine("healthy")
    assert gpus.getFirstAvailable(verbose=True) == [1]
    assert "GPU [1] is available" in capsys.readouterr().out
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(RuntimeError, match="after 3 attempts"):
        gpus.getFirstAvailable(maxLoad=0, attempts=3, interval=7)
    assert slept == [7, 7]


def test_utilization_is_shown_as_gputil_does(machine, capsys):
    machine("healthy")
    gpus.showUtilization()
    assert capsys.readouterr().out.splitlines() == [
        "| ID | GPU | MEM |",
        "-" * 18,
        "|  0 | 97% | 11% |",
        "|  1 |  0% | 11% |",
    ]
    gpus.showUtilization(all=True)
    text = capsys.readouterr().out
    assert "| Serial       |" in text and "|      81920MB |" in text
    gpus.showUtilization(attrList=[[{"attr": "name", "name": "N"}], [{"attr": "id", "name": "ID"}]])
    assert capsys.readouterr().out.splitlines()[2] == "| NVIDIA H100 ||  0 |"
    machine("init_failed")
    gpus.showUtilization()
    assert capsys.readouterr().out.splitlines()[0] == "| ID | GPU | MEM |"
    assert gpus.getGPUs() == []
