"""Recordings of memory, and what `brimful report` makes of them."""

import html
import json
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from brimful import memory
from brimful.__main__ import main as brimful_main
from brimful.cli.report import main as report


def train(steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10)
    )
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.randn(16, 1, 28, 28)), torch.arange(16) % 10)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def recorded(tmp_path):
    """The file of a recording of three steps."""
    path = tmp_path / "run.brimful"
    with memory.record(path):
        kept = train()
    del kept
    return path


def data_of(page):
    return json.loads(re.search(r"id=data>(.*?)</script>", page, re.S)[1])


def summed(differences):
    total, values = 0, []
    for difference in differences:
        total += difference
        values.append(total)
    return values


def write(tmp_path, *arguments):
    """The report of these arguments."""
    page = tmp_path / "page.html"
    assert report([*map(str, arguments), "-o", str(page)]) == 0
    return page.read_text()


class TestRecord:
    def test_its_peak_is_that_of_peak_by_category(self):
        with memory.track():
            memory.start_recording()
            model, optimizer = train()
            peak = memory.peak_by_category(models=model, optimizers=optimizer)
            made = memory.stop_recording(models=model, optimizers=optimizer)
            assert memory.tracking()
        [cpu] = [part for part in made.devices if part.device == "cpu"]
        assert (cpu.peak_bytes, cpu.peak_by_category) == (peak.bytes, peak.by_category)
        assert cpu.peak_by_category["parameters"] > 0
        assert cpu.peak_by_category["optimizer_state"] > 0
        assert cpu.steps == 3
        assert cpu.lost_events == 0
        lines = {line: size for line, category, size, _ in cpu.peak_by_line if size > 40_000}
        assert any("test_memory_report.py" in line and "(train)" in line for line in lines)

    def test_it_starts_and_stops_tracking_where_that_is_off(self, recorded):
        assert not memory.tracking()
        assert not memory.recording()
        [cpu] = memory.load_recording(recorded).devices
        assert cpu.steps == 3  # the optimizer's hooks were there

    def test_twice_is_an_error_and_the_first_goes_on(self, tmp_path):
        path = tmp_path / "a.brimful"
        with memory.record(path):
            with (
                pytest.raises(RuntimeError, match="recorded already"),
                memory.record(tmp_path / "b.brimful"),
            ):
                pass
            torch.empty(10)
        assert memory.load_recording(path).devices[0].events >= 2
        assert not (tmp_path / "b.brimful").exists()

    def test_bad_arguments_leave_tracking_off(self):
        with pytest.raises(ValueError, match=r"ring_bytes: 10\b"):
            memory.start_recording(ring_bytes=10)
        assert not memory.tracking()
        with pytest.raises(RuntimeError, match="not recorded"):
            memory.stop_recording()
        with memory.track(), pytest.raises(ValueError, match="modules"):
            memory.start_recording(modules=nn.Linear(1, 1))

    def test_an_exception_ends_it_with_a_file(self, tmp_path):
        path = tmp_path / "run.brimful"
        with pytest.raises(KeyError), memory.record(path):
            torch.empty(10)
            raise KeyError
        assert memory.load_recording(path).devices[0].events >= 2

    def test_a_file_that_cannot_be_written_is_a_warning_and_elsewhere(
        self, tmp_path, monkeypatch, caplog
    ):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        with memory.record(tmp_path / "absent" / "run.brimful"):
            torch.empty(10)
        [line] = [r.message for r in caplog.records if "recording" in r.message]
        [path] = tmp_path.glob("brimful-*-run.brimful")
        assert str(path) in line
        assert memory.load_recording(path).devices[0].events >= 2

    def test_threads(self, tmp_path):
        def allocate():
            for _ in range(200):
                torch.empty(100)

        memory.start_recording()
        threads = [threading.Thread(target=allocate) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [cpu] = memory.stop_recording().devices
        assert cpu.events >= 2 * 8 * 200

    def test_a_forked_child_writes_no_file(self, tmp_path):
        code = f"""
            import os, torch
            from brimful import memory
            with memory.record({str(tmp_path / "run.brimful")!r}):
                child = os.fork()
                torch.empty(10)
            if child == 0:
                os._exit(os.path.exists({str(tmp_path / "run.brimful")!r}))
            assert os.waitpid(child, 0)[1] in (0, 256)
            assert memory.load_recording({str(tmp_path / "run.brimful")!r}).devices[0].events == 2
        """
        run_python(code)

    def test_each_rank_writes_its_own(self, tmp_path, monkeypatch, recorded):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with memory.record(tmp_path / "job.brimful"):
            torch.empty(10)
        assert memory.load_recording(tmp_path / "job.rank1.brimful").rank == 1
        page = write(tmp_path, tmp_path / "job.rank1.brimful", recorded)
        assert [timeline["name"] for timeline in data_of(page)["timelines"]] == [
            "rank 0, cpu",
            "rank 1, cpu",
        ]


def run_python(code):
    import textwrap

    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True, timeout=110
    )


class TestPage:
    def test_it_has_the_recording_and_needs_no_other_file(self, recorded, tmp_path):
        page = write(tmp_path, recorded)
        assert page.startswith("<!DOCTYPE html>")
        code = re.sub(r"id=data>.*?</script>", "", page)  # has the command of this process
        assert code != page
        assert not re.findall(r"""(?:src|href)=|url\(|import |fetch\(""", code)
        [timeline] = data_of(page)["timelines"]
        [cpu] = memory.load_recording(recorded).devices
        totals = [
            sum(values)
            for values in zip(*(summed(s["values"]) for s in timeline["category"]), strict=True)
        ]
        assert max(totals) == cpu.peak_bytes == timeline["peak"]["bytes"]
        assert summed(timeline["step"])[-1] == 3
        assert "(train)" in page

    def test_two_runs(self, tmp_path):
        paths = [tmp_path / "before.brimful", tmp_path / "after.brimful"]
        for path, size in zip(paths, (1 << 18, 1 << 20), strict=True):
            with memory.record(path):
                held = torch.empty(size)
                del held
        page = write(tmp_path, *paths, "--diff")
        [row] = data_of(page)["devices"][0]["lines"]["rows"]
        assert row["after"] - row["before"] == 3 << 20
        assert "test_memory_report.py" in row["line"]
        assert [timeline["name"] for timeline in data_of(page)["timelines"]] == ["before", "after"]

    def test_files_that_are_no_recordings(self, tmp_path, recorded, capsys):
        absent, text, cut = (tmp_path / name for name in ("absent", "text", "cut"))
        text.write_text("hello")
        cut.write_bytes(recorded.read_bytes()[:-100])
        for path, words in (
            (absent, "No such file"),
            (tmp_path, "Is a directory"),
            (text, "no recording of memory"),
            (cut, "cut off"),
        ):
            assert report([str(path), "-o", str(tmp_path / "page.html")]) == 2
            error = capsys.readouterr().err
            assert words in error
            assert str(path) in error
            assert not (tmp_path / "page.html").exists()

    def test_an_output_that_cannot_be_written(self, tmp_path, recorded, capsys):
        for option in ("-o", "--perfetto", "--memory-viz"):
            assert report([str(recorded), option, str(tmp_path / "absent" / "x")]) == 2
            assert str(tmp_path / "absent" / "x") in capsys.readouterr().err

    def test_arguments_that_do_not_fit(self, recorded, capsys):
        with pytest.raises(SystemExit):
            report([str(recorded), "--diff"])
        assert report([str(recorded), str(recorded)]) == 2
        assert "--diff" in capsys.readouterr().err

    @pytest.mark.parametrize("option", ["--perfetto", "--memory-viz"])
    def test_a_difference_needs_a_page(self, recorded, option, tmp_path, capsys):
        other, page = tmp_path / "other", tmp_path / "page.html"
        arguments = [str(recorded), str(recorded), "--diff", option, str(other)]
        with pytest.raises(SystemExit):
            report(arguments)
        assert f"none is written ({option}: given); add -o" in capsys.readouterr().err
        assert not other.exists()
        assert report([*arguments, "-o", str(page)]) == 0
        assert page.exists() and other.exists()

    def test_the_command(self, recorded, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert brimful_main(["report", str(recorded)]) == 0
        assert capsys.readouterr().out == "report.html\n"
        assert (tmp_path / "report.html").stat().st_size > 10_000


class TestPerfetto:
    def test_counters_add_up_to_the_peak(self, recorded, tmp_path):
        path = tmp_path / "trace.json"
        assert report([str(recorded), "--perfetto", str(path)]) == 0
        events = json.loads(path.read_text())["traceEvents"]
        used = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
        assert max(used) == memory.load_recording(recorded).devices[0].peak_bytes
        assert sum(event["ph"] == "X" for event in events) == 4
        assert not (tmp_path / "report.html").exists()


def fake_flamegraph(text):
    return text


class TestMemoryViz:
    @pytest.fixture
    def snapshot(self, tmp_path):
        """A block from before that lives, one that dies, and steps; with the recording."""
        with memory.track():
            self.standing, dying = torch.empty(1000), torch.empty(500)
            memory.start_recording()
            del dying
            self.kept = torch.empty(3000)
            train(1)
            made = memory.stop_recording()
        made.save(str(tmp_path / "run.brimful"))
        path = tmp_path / "snapshot.pickle"
        assert report([str(tmp_path / "run.brimful"), "--memory-viz", str(path)]) == 0
        return path, made.devices[0]

    def test_torch_reads_it(self, snapshot):
        path, cpu = snapshot
        data = pickle.loads(path.read_bytes())
        [trace] = data["device_traces"]
        sizes = {"alloc": 1, "free_requested": -1, "free_completed": 0, "snapshot": 0}
        used = sum(s["total_size"] for s in data["segments"])
        totals = [used]
        for event in reversed(trace):
            used -= sizes[event["action"]] * event["size"]
            totals.append(used)
        assert sum(event["action"] == "alloc" for event in trace) * 2 > cpu.events * 0.9
        assert max(totals) <= cpu.peak_bytes
        assert max(totals) > 100_000
        assert "(train)" not in str(trace[0])
        assert {e["category"] for e in trace} >= {"activations", "temporaries", "unknown"}
        text = _memory_viz.memory(data, fake_flamegraph)
        assert re.search(r"test_memory_report.py:\d+:.*snapshot 4000\n", text)
        assert re.search(r"test_memory_report.py:\d+:.*snapshot 12000\n", text)
        assert "seg_" in _memory_viz.segments(data, fake_flamegraph)
        assert "= seg_" in _memory_viz.trace(data)
        assert "active_allocated" in _memory_viz.compare([], data["segments"], fake_flamegraph)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert "MiB" in _memory_viz.segsum(data) or "KiB" in _memory_viz.segsum(data)

    @pytest.mark.filterwarnings("ignore:.*found in sys.modules")
    @pytest.mark.parametrize("command", ["trace_plot", "segment_plot", "stats"])
    def test_the_commands_of_torch(self, snapshot, tmp_path, command, monkeypatch):
        path, _ = snapshot
        out = [] if command == "stats" else ["-o", str(tmp_path / "x.html")]
        monkeypatch.setattr(sys, "argv", ["_memory_viz", command, str(path), *out])
        runpy.run_module("torch.cuda._memory_viz", run_name="__main__")
        if out:
            assert "snapshot.pickle" in (tmp_path / "x.html").read_text()

    def test_many_entries_and_odd_names(self, tmp_path):
        scope = {"torch": torch}
        code = compile("for _ in range(3000): torch.empty(2)", "größe_\U0001d54f.py", "exec")
        with memory.record(tmp_path / "run.brimful"):
            exec(code, scope)
        path = tmp_path / "snapshot.pickle"
        assert report([str(tmp_path / "run.brimful"), "--memory-viz", str(path)]) == 0
        [trace] = pickle.loads(path.read_bytes())["device_traces"]
        assert len(trace) == 9001
        assert trace[0]["frames"][0]["filename"] == "größe_\U0001d54f.py"


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser (chromium)")

# Beside the page: what went wrong goes into the title, and what a user does is done.
BEFORE = "<script>window.onerror = words => { document.title = 'failed: ' + words; };</script>"
AFTER = """<script>
document.body.dataset.areas = document.querySelectorAll(".chart path.area").length;
setTimeout(() => {
  const svg = document.querySelector(".chart svg");
  const box = svg.getBoundingClientRect();
  const point = (kind, x) => svg.dispatchEvent(new PointerEvent(kind, {
    clientX: box.left + x, clientY: box.top + 100, button: 0, bubbles: true}));
  const body = document.body.dataset;
  const tops = () => [...document.querySelectorAll(".chart path.area")].map(path =>
    Math.min(...[...path.getAttribute("d").matchAll(/[ML][\\d.]+,([\\d.-]+)/g)].map(m => +m[1])));
  const times = () => [...svg.querySelectorAll("text")].map(text => text.textContent).join("|");
  document.querySelectorAll("button")[3].click();  // by event: all steps have room
  const cut = [...svg.querySelectorAll("text")].filter(text => {
    const {left, right} = text.getBoundingClientRect();
    return left < box.left - 1 || right > box.right + 1;
  });
  body.cut = cut.map(text => text.textContent).join("|");
  body.names = [...svg.querySelectorAll("path.area")].map(path => path.dataset.name).join("|");
  body.top = Math.min(...tops());
  body.height = svg.clientHeight - 52;
  body.texts = times();
  point("pointermove", 200);
  body.tip = document.querySelector(".tip").textContent;
  document.querySelectorAll("button")[1].click();
  body.lines = [...svg.querySelectorAll("path.area")].map(path => path.dataset.name).join("|");
  point("pointerdown", 300);
  point("pointermove", 400);
  point("pointerup", 400);
  body.zoomed = times();
  document.querySelectorAll("button")[4].click();
  body.whole = times();
  body.done = "yes";
}, 500);
</script>"""

AFTER_COLORS = """<script>
setTimeout(() => {
  document.body.dataset.colors = [...document.querySelectorAll(".chart path.area")].map(path =>
    `${path.dataset.name}=${getComputedStyle(path).fill}`).join("|");
}, 500);
</script>"""


def browse(folder, page, *options):
    """What a browser writes to stdout."""
    return subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
         f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", *options,
         page.as_uri()],
        check=True, timeout=100, capture_output=True, text=True,
    ).stdout  # fmt: skip


@needs_browser
def test_the_page_in_a_browser(recorded, tmp_path):
    page = write(tmp_path, recorded)
    seen = tmp_path / "seen.html"
    seen.write_text(page.replace("<body>", "<body>" + BEFORE).replace("</body>", AFTER + "</body>"))
    dom = browse(tmp_path, seen, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom)[1]
    assert title == "Memory of cpu"
    body = dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<body[^>]*>", dom)[0]))
    assert body["done"] == "yes"
    [timeline] = data_of(page)["timelines"]
    assert int(body["areas"]) == len(timeline["category"])  # drawn before anything can be clicked
    assert body["names"].split("|") == [series["name"] for series in timeline["category"]]
    assert body["lines"].split("|") == [series["name"] for series in timeline["line"]]
    height = float(body["height"])
    assert float(body["top"]) == pytest.approx(height * (1 - 1 / 1.06), abs=0.02)
    assert all(f"step {k}" in body["texts"] for k in range(4))
    assert body["cut"] == ""
    assert "peak " in body["texts"]
    assert "in use" in body["tip"]
    assert "parameters" in body["tip"]
    assert body["zoomed"] != body["whole"]


def shown(folder, page):
    """The text that the page shows, and the DOM of it."""
    main = re.search(r"<main>(.*)</main>", browse(folder, page, "--dump-dom"), re.S)[1]
    return html.unescape(re.sub(r"<[^>]*>", " ", main)), main


@needs_browser
def test_what_the_pages_show(tmp_path):
    nothing, small, large = (tmp_path / f"<img>{k}.brimful" for k in range(3))
    with memory.record(nothing):
        pass
    with memory.record(small, ring_bytes=1 << 16):
        held = [torch.empty(64) for _ in range(5000)]
        del held
    with memory.record(large):
        held = torch.empty(1 << 20)
        del held
    page = tmp_path / "page.html"

    write(tmp_path, nothing)
    text, dom = shown(tmp_path, page)
    assert "Nothing was allocated or freed" in text
    assert "<img>0.brimful" in text
    assert "<img>" not in dom
    write(tmp_path, small)
    assert re.search(r"\d,\d{3} older events made room for newer ones", shown(tmp_path, page)[0])
    write(tmp_path, small, large, "--diff")
    text, dom = shown(tmp_path, page)
    # With what tests before this one left in the process.
    peaks = re.search(r"([\d.]+) ([KM])iB  before,  ([\d.]+) MiB  after", text)
    assert peaks
    before, unit, after = peaks.groups()
    assert float(after) > float(before) / (1024 if unit == "K" else 1) + 1
    assert dom.count("<svg") == 2
    assert re.search(r'<span class="more">\+4.0 MiB.*test_memory_report.py', dom, re.S)
    assert '<span class="less">-' in dom
    write(tmp_path, nothing, nothing, "--diff")
    assert shown(tmp_path, page)[0].count("No difference.") == 2


@needs_browser
def test_what_the_page_of_an_error_shows(tmp_path):
    page = tmp_path / "oom.html"
    memory.set_limit("cpu", memory.stats("cpu").used_bytes + (8 << 20))
    try:
        with memory.track(report=page), pytest.raises(torch.OutOfMemoryError):
            held = torch.ones(1 << 20)
            torch.ones(4 << 20)
    finally:
        memory.set_limit("cpu", None)
    del held
    text, dom = shown(tmp_path, page)
    report = memory.last_oom()
    assert f"16.0 MiB were asked for at  {report.place}" in text
    assert all(f"Try:  {finding.advice}." in text for finding in report.findings)
    assert re.search(r'class="bar"><i class="" style="width:\d+.\d%">', dom)
    assert str(report) in text


@needs_browser
def test_a_screenshot_of_the_page_shows_what_filled_the_memory(recorded, tmp_path):
    from PIL import Image  # not where a wheel is checked

    page = tmp_path / "page.html"
    picture = tmp_path / "page.png"
    page.write_text(write(tmp_path, recorded).replace("</body>", AFTER_COLORS + "</body>"))
    dom = browse(tmp_path, page, "--dump-dom")
    told = re.search(r'data-colors="([^"]*)"', dom)[1]
    colors = {
        name: tuple(map(int, rgb.split(", ")))
        for name, rgb in re.findall(r"([^=|]+)=rgb\(([\d, ]+)\)", told)
    }
    browse(tmp_path, page, f"--screenshot={picture}", "--hide-scrollbars")
    with Image.open(picture) as image:
        assert image.size == (1200, 900)
        pixels = {color: count for count, color in image.convert("RGB").getcolors(1200 * 900)}
    [timeline] = data_of(page.read_text())["timelines"]
    most = {series["name"]: max(summed(series["values"])) for series in timeline["category"]}
    large = [name for name, size in most.items() if size > sum(most.values()) / 10]
    assert len({colors[name] for name in large}) == len(large) >= 2
    assert all(pixels.get(colors[name], 0) > 1000 for name in large), (pixels, colors)
