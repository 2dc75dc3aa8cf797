"""What a job's steps did, read back from each place that it was written to, and `brimful top --job`."""

import copy
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from pathlib import Path

import pytest
import torch
from models import classes, cross_entropy, wrap

import brimful
from brimful.__main__ import main
from brimful.cli import _job
from brimful.metrics import HELP, JsonLines, Metrics, OpenTelemetry, Prometheus, TensorBoard, WandB

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def loss_that_runs_out(model, piece):
    if len(piece[1]) > 4:
        raise torch.OutOfMemoryError("planted")
    return cross_entropy(model, piece)


class Kept:
    def __init__(self):
        self.samples = []
        self.closed = 0

    def write(self, sample):
        self.samples.append(sample)

    def close(self):
        self.closed += 1


def train(*exporters, steps=STEPS, loss_fn=loss_that_runs_out, **options):
    """The sizer of some steps that were looked at; the first one has a retry."""
    sizer = brimful.BatchSizer(net())
    with Metrics(sizer=sizer, to=exporters, **{"interval_s": 0, **options}):
        for _ in range(steps):
            sizer.step(classes(8), loss_fn)
            sizer._model.zero_grad()
    return sizer


def test_a_sample_has_what_the_sizer_saw():
    kept = Kept()
    report = train(kept).report()
    assert [sample.step for sample in kept.samples] == [1, 2, 3, 4, 4]
    assert [sample.ended for sample in kept.samples] == [False] * 4 + [True]
    assert kept.closed == 1
    values = kept.samples[-1].values
    assert values["steps_total"] == report.steps == STEPS
    assert values["retries_total"] == report.retries == 1
    assert values["ooms_total"] == 1
    assert values["pieces"] == 2
    assert values["piece_rows"] == 4
    assert values["stepping_seconds_total"] == pytest.approx(report.total_ms / 1e3)
    assert values["lost_seconds_total"] == pytest.approx(report.lost_ms / 1e3)
    assert values["peak_bytes"] > 0 and values["loss"] > 0 and values["stop"] == 0
    middle = kept.samples[2].values
    assert middle["step_seconds"] == pytest.approx(report.history[2].total_ms / 1e3)
    assert set(values) <= set(HELP)


def test_counts_are_of_all_steps_where_samples_are_not():
    kept = Kept()
    train(kept, interval_s=1000)
    assert [sample.values["steps_total"] for sample in kept.samples] == [1, STEPS]
    seconds = [sample.values["stepping_seconds_total"] for sample in kept.samples]
    assert kept.samples[1].values["step_seconds"] == pytest.approx((seconds[1] - seconds[0]) / 3)


def test_figures_of_the_programs_own():
    kept = Kept()
    train(kept, values=lambda: {"tokens_total": 7, "evaluations_total": 1, "broken": float("nan")})
    assert kept.samples[0].values["tokens_total"] == 7
    assert kept.samples[0].values["evaluations_total"] == 1
    assert "broken" not in kept.samples[0].values


def test_a_figure_that_is_no_number_leaves_the_others(caplog):
    kept = Kept()
    train(kept, values=lambda: {"note": "abc", "tokens_total": 7})
    assert [sample.values["tokens_total"] for sample in kept.samples] == [7] * (STEPS + 1)
    assert "note" not in kept.samples[0].values and "(what: values)" in caplog.text


def test_a_part_that_fails_leaves_the_others(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("the group has gone")
        yield

    monkeypatch.setattr(brimful.metrics, "of_sizer", fails)
    kept = Kept()
    train(kept, values=lambda: {"tokens_total": 7})
    assert [sample.values for sample in kept.samples] == [{"tokens_total": 7}] * (STEPS + 1)
    assert "(what: figures): the group has gone" in caplog.text


def test_steps_of_a_sizer_that_has_gone_are_in_the_last_sample():
    kept = Kept()
    sizer = brimful.BatchSizer(net())
    metrics = Metrics(sizer=sizer, to=[kept], interval_s=1000)
    for _ in range(5):
        sizer.step(classes(8), cross_entropy)
        sizer._model.zero_grad()
    gone, seconds = weakref.ref(sizer), sizer.report().total_ms / 1e3
    del sizer
    assert gone() is None
    metrics.close()
    first, last = kept.samples
    assert (first.step, last.step, last.ended) == (1, 5, True)
    assert last.values["stepping_seconds_total"] == pytest.approx(seconds)


def test_a_rank_is_known_once_there_is_a_group(monkeypatch):
    kept = Kept()
    sizer = brimful.BatchSizer(net())
    metrics = Metrics(sizer=sizer, to=[kept], interval_s=0)
    with monkeypatch.context() as later:
        later.setattr(torch.distributed, "is_initialized", lambda: True)
        later.setattr(torch.distributed, "get_rank", lambda: 3)
        later.setattr(torch.distributed, "get_world_size", lambda: 4)
        metrics._sample()
    metrics.close()  # after the group has been destroyed
    assert [(s.rank, s.world_size) for s in kept.samples] == [(3, 4), (3, 4)]


def test_ranks_that_a_launcher_started_without_a_group_differ(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    kept = Kept()
    train(kept)
    assert {(s.rank, s.world_size) for s in kept.samples} == {(3, 4)}
    assert all(s.values["work_seconds"] > 0 for s in kept.samples)


class Failing(Kept):
    def write(self, sample):
        super().write(sample)
        raise OSError("the disk is full")

    def close(self):
        raise RuntimeError("gone")


def test_what_fails_is_logged_once_and_never_raised(caplog):
    def no_values():
        raise LookupError("no tokens")

    kept, failing = Kept(), Failing()
    with caplog.at_level(logging.WARNING, logger="brimful"):
        train(failing, kept, loss_fn=cross_entropy, values=no_values)
    assert len(failing.samples) == len(kept.samples) == STEPS + 1
    failed = "metrics go on, but a part of them failed; further failures of it are not logged"
    assert [line.getMessage() for line in caplog.records] == [
        f"{failed} (what: values): no tokens",
        f"{failed} (what: Failing): the disk is full",
    ]


def test_an_exporter_that_hangs_loses_samples_and_holds_nothing_up(monkeypatch):
    goes_on = threading.Event()

    class Hanging(Kept):
        def write(self, sample):
            assert goes_on.wait(20)
            super().write(sample)

    monkeypatch.setattr(brimful.metrics, "_WAITING", 1)
    kept = Hanging()
    sizer = brimful.BatchSizer(net())
    metrics = Metrics(sizer=sizer, to=[kept], interval_s=0)
    for _ in range(20):
        sizer.step(classes(8), cross_entropy)
        sizer._model.zero_grad()
    assert kept.samples == []
    goes_on.set()
    metrics.close()
    last = kept.samples[-1]
    assert last.ended and last.values["steps_total"] == 20
    assert 17 <= last.values["samples_lost_total"] <= 18
    assert len(kept.samples) + last.values["samples_lost_total"] == 21


def test_an_exporter_that_hangs_for_good_is_waited_for_once(monkeypatch, caplog):
    goes_on = threading.Event()

    class Hanging(Kept):
        def write(self, sample):
            goes_on.wait(20)

    monkeypatch.setattr(brimful.metrics, "_WAITING", 1)
    monkeypatch.setattr(brimful.metrics, "_CLOSE_S", 0.5)
    sizer = brimful.BatchSizer(net())
    metrics = Metrics(sizer=sizer, to=[Hanging()], interval_s=0)
    for _ in range(4):
        sizer.step(classes(8), cross_entropy)
        sizer._model.zero_grad()
    began = time.monotonic()
    metrics.close()
    seconds = time.monotonic() - began
    goes_on.set()
    assert 0.5 <= seconds < 0.9
    assert "exporters were not done when their time was over (seconds: 0.5)" in caplog.text


def test_an_exporter_that_exits_loses_nothing_of_the_others():
    class Exiting(Kept):
        def write(self, sample):
            sys.exit("no more")

    kept = Kept()
    train(Exiting(), kept)
    assert len(kept.samples) == STEPS + 1 and kept.closed == 1


def test_steps_of_a_fork_are_warned_of(tmp_path, caplog):
    kept = Kept()
    sizer = brimful.BatchSizer(net())
    metrics = Metrics(sizer=sizer, to=[kept], interval_s=0)
    if (child := os.fork()) == 0:
        status = 1
        try:
            for _ in range(2):
                metrics._after_step()
            metrics.close()
            (tmp_path / "log").write_text(caplog.text)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    log = (tmp_path / "log").read_text()
    assert log.count("make Metrics in the process that steps") == 1
    assert f"(process: {child}, made in: {os.getpid()})" in log
    metrics.close()
    assert len(kept.samples) == 1


def test_what_cannot_be_looked_at_or_written_to_is_refused():
    with pytest.raises(ValueError, match="pass sizer=, ddp= or pipeline="):
        Metrics(to=[])
    with pytest.raises(ValueError, match="a sizer or a pipeline, not both"):
        Metrics(sizer=brimful.BatchSizer(net()), pipeline=two_stages(), to=[])
    with pytest.raises(TypeError, match=r"an exporter has write\(sample\)"):
        Metrics(sizer=brimful.BatchSizer(net()), to=["metrics.jsonl"])
    with pytest.raises(ValueError, match=r"must not be negative \(interval_s: -1\)"):
        Metrics(sizer=brimful.BatchSizer(net()), to=[], interval_s=-1)


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: Prometheus(0), "prometheus_client"),
        (OpenTelemetry, "opentelemetry"),
        (lambda: TensorBoard("."), "tensorboard"),
        (WandB, "wandb"),
    ],
)
def test_a_package_that_is_missing_names_the_command(monkeypatch, make, package):
    monkeypatch.setitem(sys.modules, package, None)
    extra = package.removesuffix("_client")
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'brimful\[{extra}\]'"):
        make()


def test_json_lines_are_read_back(tmp_path):
    train(JsonLines(tmp_path / "job"), job="night")
    (file,) = (tmp_path / "job").iterdir()
    assert file.name == "rank-00000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert lines[-1]["ended"] and lines[-1]["retries_total"] == 1
    assert {line["job"] for line in lines} == {"night"} and lines[0]["pid"] == os.getpid()
    train(JsonLines(tmp_path / "one.jsonl"), values=lambda: {"rank": 9})
    assert json.loads((tmp_path / "one.jsonl").read_text().splitlines()[0])["rank"] == 0


def test_a_line_that_was_torn_takes_no_other_with_it(tmp_path):
    file = tmp_path / "rank-00000.jsonl"
    file.write_text('{"half a li')
    train(JsonLines(tmp_path))
    torn, *lines = file.read_text().splitlines()
    assert torn == '{"half a li'
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 4]


def test_prometheus_is_scraped(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    exporter = Prometheus(0, textfile=tmp_path / "brimful.prom")
    sizer = brimful.BatchSizer(net())
    metrics = Metrics(sizer=sizer, to=[exporter], interval_s=0, job="night")
    sizer.step(classes(8), loss_that_runs_out)
    address = f"http://127.0.0.1:{exporter.port}/metrics"
    deadline = time.monotonic() + 10
    while not (text := urllib.request.urlopen(address).read().decode()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = {f.name: f for f in parser.text_string_to_metric_families(text)}
    retries = found["brimful_retries"]
    assert retries.type == "counter" and retries.documentation == HELP["retries_total"]
    (sample,) = retries.samples
    assert sample.name == "brimful_retries_total" and sample.value == 1
    assert sample.labels == {"job_name": "night", "rank": "0"}
    assert found["brimful_peak_bytes"].type == "gauge"
    assert found["brimful_last_sample_timestamp_seconds"].samples[0].value > 1e9
    metrics.close()
    assert (
        'brimful_steps_total{job_name="night",rank="0"} 1.0'
        in (tmp_path / "brimful.prom").read_text()
    )
    with pytest.raises(OSError):
        urllib.request.urlopen(address)


def test_prometheus_has_figures_of_any_name():
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.openmetrics.exposition import generate_latest
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    registry = client.CollectorRegistry()
    own = {"tokens/s": 1.0, "rows": 2.0, "rows_total": 3.0}
    kept, sizer = Kept(), brimful.BatchSizer(net())
    to = [Prometheus(registry=registry), kept]
    with Metrics(sizer=sizer, to=to, interval_s=0, values=lambda: own):
        sizer.step(classes(8), cross_entropy)
        wait_for(lambda: kept.samples)
        page = generate_latest(registry).decode()
    families = {f.name: f for f in text_string_to_metric_families(page)}
    found = [families[f"brimful_{name}"].samples[0] for name in ("tokens_s", "rows_now", "rows")]
    assert [sample.value for sample in found] == [1, 2, 3]
    assert found[-1].name == "brimful_rows_total"


def wait_for(found):
    deadline = time.monotonic() + 10
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prometheus_that_was_closed_says_that_it_exports_nothing(caplog):
    pytest.importorskip("prometheus_client")
    exporter = Prometheus(0)
    train(exporter)
    assert "make a new one" not in caplog.text
    train(exporter)
    assert f"(port: {exporter.port}); make a new one for other Metrics" in caplog.text


def test_a_fork_does_not_keep_the_port():
    pytest.importorskip("prometheus_client")
    exporter = Prometheus(0)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, b".")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(reader, 1)
        exporter.close()
        Prometheus(exporter.port).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_opentelemetry_is_collected():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    sizer = brimful.BatchSizer(net())
    metrics = Metrics(sizer=sizer, to=[OpenTelemetry(meter)], interval_s=0)
    sizer.step(classes(8), loss_that_runs_out)
    deadline, found = time.monotonic() + 10, {}
    while not found.keys() >= {"brimful.stepping", "brimful.peak", "brimful.retries"}:
        assert time.monotonic() < deadline
        data = reader.get_metrics_data()
        scopes = [s for r in (data.resource_metrics if data else []) for s in r.scope_metrics]
        found = {m.name: m for scope in scopes for m in scope.metrics}
    metrics.close()
    assert found["brimful.stepping"].unit == "s" and found["brimful.stepping"].data.is_monotonic
    assert found["brimful.peak"].unit == "By"
    (point,) = found["brimful.retries"].data.data_points
    assert point.value == 1 and point.attributes == {"job": "", "rank": 0}


def test_opentelemetry_has_figures_that_differ_in_unit_alone():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    own = {"read_seconds": 1, "read_bytes": 2, "a b": 3}
    kept, sizer = Kept(), brimful.BatchSizer(net())
    to = [OpenTelemetry(meter), kept]
    metrics = Metrics(sizer=sizer, to=to, interval_s=0, values=lambda: own)
    sizer.step(classes(8), cross_entropy)
    wait_for(lambda: kept.samples)
    (scope,) = (s for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics)
    found = [(m.name, m.unit, p.value) for m in scope.metrics for p in m.data.data_points]
    metrics.close()
    assert len({name for name, *_ in found}) == len(found)
    expected = {("brimful.read", "s", 1), ("brimful.read_bytes", "By", 2), ("brimful.a_b", "1", 3)}
    assert expected <= set(found)


def test_tensorboard_reads_its_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    pieces = events.Scalars("brimful/pieces")
    assert [(event.step, event.value) for event in pieces] == [(s, 2) for s in (1, 2, 3, 4, 4)]


def test_a_writer_of_the_programs_own_stays_open():
    class Writer(dict):
        def add_scalar(self, tag, value, step):
            self[tag] = value, step

    writer = Writer()
    train(TensorBoard(writer))
    assert writer["brimful/retries_total"] == (1, STEPS)


def test_a_writer_of_the_programs_own_has_the_last_sample_in_its_file(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer, kept = SummaryWriter(str(tmp_path)), Kept()
    sizer = brimful.BatchSizer(net())
    metrics = Metrics(sizer=sizer, to=[TensorBoard(writer), kept], interval_s=0)
    sizer.step(classes(8), cross_entropy)
    wait_for(lambda: kept.samples)
    writer.close()  # the program is done; what comes now opens a second file
    metrics.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    counts = {name: len(events.Scalars(f"brimful/{name}")) for name in kept.samples[-1].values}
    assert counts == dict.fromkeys(counts, 2)


class RunOfWandB:
    """Rows as W&B has them: one for each step, written with the next; what is late is dropped."""

    def __init__(self):
        self.step, self.row, self.rows, self.summary = 0, {}, {}, {}
        self.axes, self.finished = {}, 0

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, data, step=None, commit=None):
        if step is not None and step < self.step:
            return
        if step is not None and step > self.step:
            self._write(step)
        self.row.update(data)
        if commit or (commit is None and step is None):
            self._write(self.step + 1)

    def _write(self, next_step):
        if self.row:
            self.rows[self.step] = self.row
        self.step, self.row = next_step, {}

    def finish(self):
        self._write(self.step + 1)
        self.finished += 1


def train_and_log(run, exporter, stride):
    """Each row of the program's after a step of the sizer, as its loop would."""
    sizer = brimful.BatchSizer(net())
    kept = Kept()
    with Metrics(sizer=sizer, to=[exporter, kept], interval_s=0):
        for step in range(STEPS):
            sizer.step(classes(8), cross_entropy)
            sizer._model.zero_grad()
            wait_for(lambda: len(kept.samples) > step)  # noqa: B023
            run.log({"mine": step}, **({"step": stride * step} if stride else {}))
    run.finish()


@pytest.mark.parametrize("stride", [None, 1, 10])
def test_the_steps_of_a_run_of_the_programs_own_are_as_they_were(caplog, stride):
    run = RunOfWandB()
    train_and_log(run, WandB(run), stride)
    mine = {step: row["mine"] for step, row in run.rows.items() if "mine" in row}
    assert mine == {(stride or 1) * step: step for step in range(STEPS)}
    steps = [row["brimful/step"] for row in run.rows.values()]
    assert steps == ([2, 3, 4, 4] if stride else [1, 2, 3, 4, 4])
    assert run.summary["brimful/steps_total"] == STEPS
    assert run.axes["brimful/*"] == "brimful/step"
    assert run.finished == 1 and caplog.text == ""


def test_samples_of_a_program_that_logs_nothing_are_warned_of(caplog):
    run = RunOfWandB()
    train(WandB(run))
    assert "no row of its own (samples: 5); WandB(run, commit=True) writes" in caplog.text
    caplog.clear()
    run = RunOfWandB()
    train(WandB(run, commit=True), name="actor")
    steps = [row["brimful-actor/step"] for row in run.rows.values()]
    assert steps == [1, 2, 3, 4, 4] and "W&B" not in caplog.text
    assert run.axes["brimful-actor/*"] == "brimful-actor/step"


class ModuleOfWandB:
    """``wandb``, which returns a run that goes on where one does."""

    def __init__(self):
        self.run = None

    def init(self, **_):
        self.run = self.run or RunOfWandB()
        return self.run


def test_a_run_that_goes_on_is_the_programs_own(monkeypatch):
    wandb = ModuleOfWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = wandb.init()
    train_and_log(run, WandB(project="p"), 1)
    assert [row.get("mine") for row in run.rows.values()] == list(range(STEPS))
    assert run.finished == 1  # by the program


def test_a_run_that_was_begun_here_is_finished_by_the_last(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", ModuleOfWandB())
    first, second = WandB(project="p"), WandB(project="p")
    run = first._run
    train(first)
    assert run.finished == 0
    train(second)
    assert run.finished == 1
    assert [row["brimful/step"] for row in run.rows.values()] == [1, 2, 3, 4, 4] * 2


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=tmp_path, project="test")
    train(WandB(run))
    assert run.summary["brimful/retries_total"] == 1 and run.summary["brimful/step"] == STEPS
    run.finish()
    assert list(tmp_path.rglob("*.wandb"))
    exporter = WandB(mode="offline", dir=tmp_path, project="test")
    train(exporter)
    assert wandb.run is None  # it was finished
    run = wandb.init(mode="offline", dir=tmp_path, project="test")
    log, finish = run.log, run.finish
    run.finish = lambda: None
    train_and_log(run, WandB(run), 1)
    log({}, step=100)  # writes the row before
    found = run.summary["mine"], run.summary["_step"], run.summary["brimful/step"]
    finish()
    assert found == (STEPS - 1, STEPS - 1, STEPS)


def plain_loop(here, folder):
    model = wrap(net())
    metrics = Metrics(ddp=model, to=[JsonLines(folder)], interval_s=0, job="plain")
    for _ in range(STEPS):
        cross_entropy(model, classes(8)).backward()
        model.zero_grad()
    metrics.close()
    return model.telemetry()


def test_a_plain_loop_of_two_ranks_is_looked_at_from_its_forwards(ranks, tmp_path):
    telemetry = ranks(plain_loop, tmp_path)
    for rank, times in enumerate(telemetry):
        file = tmp_path / f"rank-{rank:05}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["steps_total"] for line in lines] == [0, 1, 2, 3, 4]
        assert lines[-1]["world_size"] == 2
        assert lines[-1]["sent_bytes"] == times["bytes"] > 0
        assert lines[-1]["wait_seconds"] == pytest.approx(times["wait_ms"] / 1e3)
        assert lines[-1]["launches_total"] >= STEPS and lines[2]["step_seconds"] > 0


def slow_on_rank_1(here, folder):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    metrics = Metrics(sizer=sizer, to=[JsonLines(folder)], interval_s=0, job="uneven")

    def loss(model, piece):
        time.sleep(0.05 * here.index)
        return cross_entropy(model, piece)

    for _ in range(3):
        sizer.step(classes(8), loss)
        model.zero_grad()
    del sizer
    metrics.close()


def test_top_shows_a_jobs_ranks(ranks, tmp_path, capsys):
    ranks(slow_on_rank_1, tmp_path)
    files = sorted(tmp_path.iterdir())
    for file in files:  # as if both were running
        lines = file.read_text().splitlines()
        assert json.loads(lines[-1])["slowest_rank"] == 1  # after the sizer has gone, too
        file.write_text("\n".join(lines[:-1]) + '\n{"half a li')
    assert main(["top", "--job", str(tmp_path), "--once"]) == 0
    head, columns, first, second = capsys.readouterr().out.splitlines()
    assert head == "uneven: 2 of 2 ranks"
    assert columns.split() == list(_job._COLUMNS)
    assert first.split()[:1] == ["0"] and "straggler" not in first
    assert second.split()[2] == "3" and re.search(r"straggler \(\d+\.\d\dx\)$", second)
    assert main(["top", "--job", str(tmp_path), "--once", "--json"]) == 0
    assert [json.loads(line)["rank"] for line in capsys.readouterr().out.splitlines()] == [0, 1]


def line_of(rank, **given):
    line = {"time": 100.0, "job": "", "host": "a", "pid": 1, "rank": rank, "world_size": 3}
    return {**line, "step": 7, "ended": False, **given}


def marks(lines, now, **options):
    table = _job.job_table(lines, now, **options).splitlines()
    at = table[1].index("mark")
    return table[0], [line[at:] for line in table[2:]]


def test_a_rank_that_is_silent_is_marked():
    lines = [line_of(0), line_of(1, time=80.0), line_of(2, time=80.0, ended=True)]
    assert marks(lines, 101.0) == ("job: 3 of 3 ranks", ["", "SILENT", "ended"])
    assert marks(lines, 101.0, silent_s=30)[1] == ["", "", "ended"]
    lines[1]["step_seconds"] = 5.0  # steps so long that it may be in one
    assert marks(lines, 101.0)[1] == ["", "", "ended"]
    assert marks(lines, 140.0)[1] == ["SILENT", "SILENT", "ended"]
    assert marks([line_of(0, stop=1.0)], 100.0) == (
        "job: 1 of 3 ranks; no sample of rank 1, 2",
        ["stops"],
    )


def test_ranks_of_a_larger_world_before_are_gone():
    lines = [line_of(0, time=200.0, world_size=2), line_of(1, time=199.0, world_size=2)]
    before = [line_of(2, world_size=4), line_of(3, world_size=4)]
    assert marks([*lines, *before], 200.0) == ("job: 2 of 2 ranks", ["", ""])


def test_the_straggler_is_the_one_of_the_last_step():
    lines = [
        line_of(0, step=9, work_seconds=0.1, slowest_rank=2, slowest_work_seconds=0.13),
        line_of(1, step=8, work_seconds=0.1, slowest_rank=1, slowest_work_seconds=0.2),
        line_of(2, step=8, work_seconds=0.13, slowest_rank=1, slowest_work_seconds=0.2),
    ]
    assert marks(lines, 100.0)[1] == ["", "", "straggler (1.30x)"]
    lines[0]["slowest_work_seconds"] = 0.103  # some rank is always last
    assert marks(lines, 100.0)[1] == ["", "", ""]
    plain = [line_of(rank, straggler_rank=1) for rank in range(3)]
    assert marks(plain, 100.0)[1] == ["", "straggler", ""]


def test_top_of_an_empty_folder_and_of_none(tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('[1]\n{"not": "ours"}\n{"rank": 3, "loss": 1}\n')
    assert main(["top", "--job", str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out == "no rank has written yet\n"
    with pytest.raises(SystemExit):
        main(["top", "--job", str(tmp_path / "none"), "--once"])
    assert "there is no such folder" in capsys.readouterr().err


def two_stages():
    stages = [torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)]
    loss_fn = torch.nn.functional.cross_entropy
    return brimful.Pipeline(stages, devices=["cpu"] * 2, loss_fn=loss_fn, microbatches=2)


def beside_a_pipeline(here):
    pipeline, model, kept = two_stages(), wrap(net()), Kept()
    with Metrics(pipeline=pipeline, ddp=model, to=[kept], interval_s=0):
        for _ in range(2):
            pipeline.step(*classes(8))
            cross_entropy(copy.deepcopy(model), classes(8)).backward()
    return [
        (sample.values["steps_total"], "launches_total" in sample.values) for sample in kept.samples
    ]


def test_a_wrapped_model_beside_a_pipeline_is_looked_at_after_its_steps(ranks):
    for samples in ranks(beside_a_pipeline):
        assert [steps for steps, _ in samples] == [1, 2, 2]
        assert all(launches for _, launches in samples)


def test_a_pipelines_steps_are_looked_at():
    pipeline = two_stages()
    kept = Kept()
    with Metrics(pipeline=pipeline, to=[kept], interval_s=0):
        for _ in range(2):
            outcome = pipeline.step(*classes(8))
    values = kept.samples[-1].values
    assert values["steps_total"] == 2 and values["microbatches"] == values["pieces"] == 2
    assert values["failed_steps_total"] == values["ooms_total"] == values["lost_seconds_total"] == 0
    assert values["stepping_seconds_total"] >= outcome.total_ms / 1e3 > 0
    assert set(values) <= set(HELP)
    assert values["loss"] == pytest.approx(outcome.loss)
    assert values["stage_wait_seconds"] >= 0


PROGRAM = """
import sys, torch, brimful
from models import classes, cross_entropy
def train():
    sizer = brimful.BatchSizer(torch.nn.Linear(6, 3))
    brimful.metrics.Metrics(sizer=sizer, to=[brimful.metrics.JsonLines(sys.argv[1])], interval_s=0)
    for _ in range(3):
        sizer.step(classes(8), cross_entropy)
        sizer._model.zero_grad()
train()  # the sizer is gone
assert "brimful.metrics" in sys.modules
raise ValueError("the end")
"""


def test_a_program_that_ends_by_an_error_writes_a_last_sample(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "ValueError: the end" in done.stderr
    lines = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["ended"] and last["steps_total"] == 3


GLOBAL_METERS = """
import torch, brimful
from brimful.metrics import Metrics, OpenTelemetry
from models import classes, cross_entropy
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader, running = InMemoryMetricReader(), []
class Kept:
    count = 0
    def write(self, sample):
        self.count += 1
    def close(self):
        pass
def train(steps):
    kept, sizer = Kept(), brimful.BatchSizer(torch.nn.Linear(6, 3))
    running.append((sizer, Metrics(sizer=sizer, to=[OpenTelemetry(), kept], interval_s=0)))
    for step in range(steps):
        sizer.step(classes(8), cross_entropy)
        sizer._model.zero_grad()
        while kept.count <= step:
            pass
train(1)
train(2)
metrics.set_meter_provider(MeterProvider([reader]))
train(3)
(of,) = reader.get_metrics_data().resource_metrics
(scope,) = of.scope_metrics
(steps,) = (metric for metric in scope.metrics if metric.name == "brimful.steps")
print(sorted(point.value for point in steps.data.data_points))
"""


def test_opentelemetrys_global_meter_is_one_before_and_after_its_provider_is_set():
    pytest.importorskip("opentelemetry.sdk")
    assert output_of(GLOBAL_METERS) == "[1.0, 2.0, 3.0]\n"


def output_of(program):
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LIBRARY_THAT_ENDS_ITSELF = """
import atexit, sys, torch, brimful, brimful.metrics
from models import classes, cross_entropy
class Library:
    ended = False
    def end(self):
        self.ended = True
    def write(self, sample):
        print("lost" if self.ended else "written", sample.step, sample.ended)
    def close(self):
        print("closed")
library = Library()
atexit.register(library.end)
sizer = brimful.BatchSizer(torch.nn.Linear(6, 3))
brimful.metrics.Metrics(sizer=sizer, to=[library])
for _ in range(3):
    sizer.step(classes(8), cross_entropy)
    sizer._model.zero_grad()
"""


def test_the_last_sample_comes_before_an_exporters_library_ends_itself():
    assert output_of(LIBRARY_THAT_ENDS_ITSELF) == "written 1 False\nwritten 3 True\nclosed\n"


def test_the_page_has_every_figure():
    page = (ROOT / "docs" / "metrics.md").read_text()
    missing = [name for name in HELP if f"`brimful_{name}`" not in page]
    assert missing == []
