"""Several Metrics of one process that go to one place, at once or after one another: all their figures are there."""

import json
import threading
import urllib.request
import weakref

import pytest
import torch
from models import classes, cross_entropy

import brimful
from brimful.__main__ import main
from brimful.metrics import JsonLines, Metrics, OpenTelemetry, Prometheus, TensorBoard


class Kept:
    def __init__(self):
        self.samples = []
        self.closed = 0

    def write(self, sample):
        self.samples.append(sample)

    def close(self):
        self.closed += 1


class Run:
    """Of a sizer, looked at after each step."""

    def __init__(self, *exporters, **options):
        self.sizer = brimful.BatchSizer(torch.nn.Linear(6, 3))
        self.written = Kept()
        to = [*exporters, self.written]
        self.metrics = Metrics(sizer=self.sizer, to=to, **{"interval_s": 0, **options})

    def steps(self, count):
        written = len(self.written.samples) + count
        for _ in range(count):
            self.sizer.step(classes(8), cross_entropy)
            self.sizer._model.zero_grad()
        until(lambda: len(self.written.samples) >= written)
        return self


def until(found):
    for _ in range(1000):
        if result := found():
            return result
        threading.Event().wait(0.01)
    raise AssertionError("it did not come")


def steps_on(page):
    return [line for line in page.splitlines() if line.startswith("brimful_steps_total")]


def series(number, **labels):
    inner = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"brimful_steps_total{{{inner}}} {number:.1f}"


def test_a_registry_has_each_figure_once_with_a_series_of_each():
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.openmetrics.exposition import generate_latest
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    registry = client.CollectorRegistry()
    first = Run(Prometheus(registry=registry)).steps(3)
    second = Run(Prometheus(registry=registry)).steps(5)
    critic = Run(Prometheus(registry=registry), name="critic").steps(2)
    labels = {"job_name": "", "rank": "0"}
    page = generate_latest(registry).decode()
    families = {f.name: f for f in text_string_to_metric_families(page)}
    assert [(s.labels, s.value) for s in families["brimful_steps"].samples] == [
        (labels, 3),
        ({**labels, "name": "2"}, 5),
        ({**labels, "name": "critic"}, 2),
    ]
    first.metrics.close()
    assert steps_on(client.generate_latest(registry).decode()) == [
        series(5, **labels, name="2"),
        series(2, **labels, name="critic"),
    ]
    second.metrics.close()
    critic.metrics.close()
    assert client.generate_latest(registry) == b""


def test_a_textfile_has_all_that_go_there(tmp_path):
    pytest.importorskip("prometheus_client")
    path = tmp_path / "brimful.prom"
    runs = [
        Run(Prometheus(textfile=path), job=job).steps(steps) for job, steps in (("a", 1), ("b", 2))
    ]
    assert steps_on(path.read_text()) == [
        series(1, job_name="a", rank="0"),
        series(2, job_name="b", rank="0"),
    ]
    runs[0].metrics.close()
    runs[1].steps(1)
    assert steps_on(path.read_text()) == [series(3, job_name="b", rank="0")]
    runs[1].metrics.close()
    assert steps_on(path.read_text()) == [series(3, job_name="b", rank="0")]


def test_an_exporter_of_several_ends_with_the_last_of_them():
    pytest.importorskip("prometheus_client")
    shared, exporter = Kept(), Prometheus(0)
    first, second = (Run(shared, exporter).steps(steps) for steps in (1, 2))
    first.metrics.close()
    assert shared.closed == 0
    second.steps(1)
    page = urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics").read().decode()
    assert steps_on(page) == [series(3, job_name="", rank="0", name="2")]
    second.metrics.close()
    assert shared.closed == 1
    assert {s.name for s in shared.samples} == {"", "2"}


def read(reader):
    """Steps by labels, as a reader of OpenTelemetry has them now."""
    data = reader.get_metrics_data()
    scopes = [scope for of in (data.resource_metrics if data else []) for scope in of.scope_metrics]
    return {
        tuple(point.attributes.values()): point.value
        for scope in scopes
        for metric in scope.metrics
        if metric.name == "brimful.steps"
        for point in metric.data.data_points
    }


@pytest.fixture
def reader_and_meter():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    return reader, MeterProvider([reader]).get_meter("test")


def test_a_meter_has_all_that_go_there(reader_and_meter):
    reader, meter = reader_and_meter
    first = Run(OpenTelemetry(meter)).steps(3)
    second = Run(OpenTelemetry(meter)).steps(5)
    assert read(reader) == {("", 0): 3, ("", 0, "2"): 5}
    first.metrics.close()
    second.metrics.close()


def test_a_meter_has_those_that_come_after_one_that_was_closed(reader_and_meter):
    reader, meter = reader_and_meter
    first = Run(OpenTelemetry(meter)).steps(3)
    first.metrics.close()
    second = Run(OpenTelemetry(meter)).steps(5)
    assert read(reader) == {("", 0): 5}
    second.metrics.close()


def test_what_was_closed_is_read_once_more(reader_and_meter):
    reader, meter = reader_and_meter
    run = Run(OpenTelemetry(meter), interval_s=1000).steps(1)
    assert read(reader) == {("", 0): 1}
    for _ in range(3):
        run.sizer.step(classes(8), cross_entropy)
        run.sizer._model.zero_grad()
    run.metrics.close()
    assert read(reader) == {("", 0): 4}
    assert read(reader) == {}


def test_tensorboard_has_tags_of_each(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = [Run(TensorBoard(tmp_path)).steps(steps) for steps in (1, 2)]
    for run in runs:
        run.metrics.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("brimful/pieces")] == [1, 1]
    assert [e.step for e in events.Scalars("brimful-2/pieces")] == [1, 2, 2]


def test_lines_of_each_are_in_a_file_of_its_own(tmp_path, capsys):
    actor = Run(JsonLines(tmp_path), name="actor").steps(1)
    critic = Run(JsonLines(tmp_path), name="critic").steps(2)
    for run in (actor, critic):
        run.metrics.close()
    lines = {
        path.name: json.loads(path.read_text().splitlines()[-1]) for path in tmp_path.iterdir()
    }
    assert {name: (line["name"], line["step"]) for name, line in lines.items()} == {
        "rank-00000-actor.jsonl": ("actor", 1),
        "rank-00000-critic.jsonl": ("critic", 2),
    }
    assert main(["top", "--job", str(tmp_path), "--once"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("job, actor: 1 of 1 ranks\n")
    assert second.startswith("job, critic: 1 of 1 ranks\n")


def names(*runs):
    found = []
    for run in runs:
        run.metrics.close()
        found.append(run.written.samples[-1].name)
    return found


def test_names_differ_where_the_place_is_one_alone(tmp_path):
    apart = [Run(JsonLines(tmp_path / str(n))) for n in range(2)]
    jobs = [Run(JsonLines(tmp_path), job=job) for job in "ab"]
    alike = [Run(JsonLines(tmp_path), name="x") for _ in range(3)]
    assert names(*apart, *jobs, *alike) == ["", "", "", "", "x", "x-2", "x-3"]
    assert names(Run(JsonLines(tmp_path), name="x")) == ["x"]  # which is free again
    with pytest.raises(ValueError, match=r"letters, digits, ., _ and - \(name: 'a/b'\)"):
        Run(name="a/b")


def test_metrics_of_a_sizer_that_has_gone_leave_their_place():
    shared = Kept()
    first = Run(shared).steps(2)
    gone, written = weakref.ref(first.sizer), first.written
    first.sizer = None
    assert gone() is None  # its Metrics held nothing of it
    second = Run(shared)
    assert written.closed == 1 and shared.closed == 0
    assert (written.samples[-1].ended, written.samples[-1].step) == (True, 2)
    assert names(second) == [""]
    assert shared.closed == 1
