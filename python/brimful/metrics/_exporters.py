"""Where samples go. Each exporter has ``write(sample)`` and ``close()``, both called from one thread of brimful's."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from brimful.integrations._extra import require
from brimful.metrics._figures import HELP, Sample
from brimful.metrics._together import forgets_in_forks, shared


class Exporter(Protocol):
    """One of the classes below, or one of your own."""

    def write(self, sample: Sample, /) -> object: ...

    def close(self) -> object: ...


def _help(name: str) -> str:
    return HELP.get(name, "A figure of the program's own")


def _prefix(sample: Sample) -> str:
    """Of a figure's name, where there are no labels."""
    return f"brimful-{sample.name}" if sample.name else "brimful"


class JsonLines:
    """One JSON line a sample, appended to the file of this rank, ``rank-00003.jsonl``, in the folder ``path``.

    With a name of ``Metrics`` that is ``rank-00003-NAME.jsonl``. ``brimful top --job FOLDER`` shows such a folder. It
    is made where it is not there. A ``path`` that ends in ``.jsonl`` is the file itself.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._is_folder = self._path.suffix != ".jsonl"
        (self._path if self._is_folder else self._path.parent).mkdir(parents=True, exist_ok=True)
        self._places = {self._path.resolve()}
        self._whole: Path | None = None  # the file that ends with a whole line

    def write(self, sample: Sample) -> None:
        header = {
            "time": round(sample.time, 3),
            "job": sample.job,
            "host": sample.host,
            "pid": sample.pid,
            "rank": sample.rank,
            "world_size": sample.world_size,
            **({"name": sample.name} if sample.name else {}),
            "step": sample.step,
            "ended": sample.ended,
        }
        line = json.dumps({**header, **sample.values, **header}).encode() + b"\n"
        name = f"rank-{sample.rank:05}{sample.name and '-' + sample.name}.jsonl"
        path = self._path / name if self._is_folder else self._path
        if path != self._whole and _is_torn(path):
            line = b"\n" + line
        self._whole = None
        # Opened each time: a folder that another program has moved or a full disk is a matter of one sample. In one
        # piece, since others may append to it too.
        with path.open("ab", buffering=len(line) + 1) as file:
            file.write(line)
        self._whole = path

    def close(self) -> None:
        pass


def _is_torn(path: Path) -> bool:
    """Whether its last line has no end: a disk was full, or its program was killed."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


class _Page:
    """The one collector of a registry: each figure is there once, with a series of each ``Metrics`` that goes there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[int, dict[int, Sample]] = {}  # by exporter and source
        forgets_in_forks(self)

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._samples = {exporter: {} for exporter in self._samples}

    def join(self, exporter: int, registry: Any) -> None:
        with self._lock:
            if not self._samples:
                registry.register(self)
            self._samples = {**self._samples, exporter: {}}

    def leave(self, exporter: int, registry: Any) -> None:
        with self._lock:
            self._samples = {e: found for e, found in self._samples.items() if e != exporter}
            if not self._samples:
                registry.unregister(self)

    def put(self, exporter: int, sample: Sample) -> None:
        with self._lock:
            found = {**self._samples[exporter], sample.source: sample}
            self._samples = {**self._samples, exporter: found}

    def drop(self, exporter: int, source: int) -> None:
        with self._lock:
            found = {s: sample for s, sample in self._samples[exporter].items() if s != source}
            self._samples = {**self._samples, exporter: found}

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        """As prometheus_client asks a collector, from any thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        seen = set()
        for sample in [s for of in self._samples.values() for s in of.values()]:
            labels = {"job_name": sample.job, "rank": str(sample.rank)}
            if sample.name:
                labels["name"] = sample.name
            values = {**sample.values, "last_sample_timestamp_seconds": sample.time}
            for figure, value in values.items():
                name = "brimful_" + re.sub(r"[^a-zA-Z0-9_:]", "_", figure)
                if f"{figure}_total" in values:  # a counter's name without the ending is taken
                    name += "_now"
                series = name, *labels.values()
                if series in seen:
                    continue
                seen.add(series)
                if name not in families:
                    counts = name.endswith("_total")
                    family = CounterMetricFamily if counts else GaugeMetricFamily
                    families[name] = family(name, _help(figure))
                families[name].add_sample(name, labels, value)
        yield from families.values()


_pages: weakref.WeakKeyDictionary[Any, _Page] = weakref.WeakKeyDictionary()
_textfiles: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # registries


class Prometheus:
    """The last sample under ``http://addr:port/metrics``, in a file for the node exporter, or both.

    ``port=0`` takes any free one, and ``.port`` says which. Ranks of one host need a port each, and a file each.
    ``textfile`` names a file that always holds the last sample, whole. ``registry`` is that of ``prometheus_client`` to
    join, where the program has its own endpoint. Several ``Metrics`` may join one, or share an exporter: all are on its
    page until they are closed. Needs ``pip install 'brimful[prometheus]'``.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        addr: str = "127.0.0.1",
        textfile: str | os.PathLike[str] | None = None,
        registry: Any = None,
    ) -> None:
        require("prometheus_client", extra="prometheus")
        import prometheus_client

        self._library = prometheus_client
        self._textfile = None if textfile is None else os.path.realpath(textfile)
        if registry is None:
            registry = prometheus_client.CollectorRegistry()
            if self._textfile is not None:  # of which another one may write the file already
                registry = _textfiles.setdefault(self._textfile, registry)
        self._registry = registry
        self._places = {id(registry), self._textfile or id(registry)}
        self._server: Any = None
        self.port = port
        if port is not None:
            self._server, _ = prometheus_client.start_http_server(port, addr, registry)
            self.port = self._server.server_port
            forgets_in_forks(self)
        self._page = shared(_pages, registry, _Page)
        self._page.join(id(self), registry)
        self._is_closed = False

    def forget(self) -> None:
        if self._server is not None:  # a fork that holds the port would keep it from its parent
            self._server.socket.close()

    def write(self, sample: Sample) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"this exporter was closed with its Metrics (port: {self.port}); make a new one for other Metrics"
            )
        self._page.put(id(self), sample)
        if self._textfile is not None:
            self._library.write_to_textfile(self._textfile, self._registry)
        if sample.ended:
            self._page.drop(id(self), sample.source)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._page.leave(id(self), self._registry)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


_OTEL_UNITS = {"_seconds": "s", "_bytes": "By"}


def _otel_name(name: str) -> tuple[str, str]:
    """OpenTelemetry has units beside names."""
    name = name.removesuffix("_total")
    for ending, unit in _OTEL_UNITS.items():
        if name.endswith(ending):
            return f"brimful.{name.removesuffix(ending)}", unit
    return f"brimful.{name}", "1"


def _labels(sample: Sample) -> dict[str, Any]:
    labels = {"job": sample.job, "rank": sample.rank}
    return {**labels, "name": sample.name} if sample.name else labels


class _Instruments:
    """Those of a meter, which has one for each name: they ask for the samples of all ``Metrics`` that go there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held while the meter is called, which has its own
        self._names: dict[str, str] = {}  # by figure
        self._samples: dict[int, Sample] = {}  # the last of each ``Metrics``
        # The last of those that were closed, with the figures that no reader has asked for.
        self._ended: list[tuple[Sample, set[str]]] = []
        forgets_in_forks(self)

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._samples, self._ended = {}, []

    def put(self, meter: Any, sample: Sample) -> None:
        with self._lock:
            if sample.ended:
                self._samples.pop(sample.source, None)
                others = [(s, unread) for s, unread in self._ended if _labels(s) != _labels(sample)]
                self._ended = [*others, (sample, set(sample.values))]
            else:
                self._samples[sample.source] = sample
            new = {name: self._name(name) for name in sample.values if name not in self._names}
        try:
            for figure in list(new):
                name, unit = new.pop(figure)
                kind = "counter" if figure.endswith("_total") else "gauge"
                create = getattr(meter, f"create_observable_{kind}")
                create(name, [self._observer(figure)], unit=unit, description=_help(figure))
        finally:
            with self._lock:
                for figure in new:  # after one that could not be made
                    del self._names[figure]

    def _name(self, figure: str) -> tuple[str, str]:
        name, unit = _otel_name(figure)
        if name in self._names.values():  # ``x_seconds`` beside ``x_bytes``
            name = f"brimful.{figure}"
        name = self._names[figure] = re.sub(r"[^-_./a-zA-Z0-9]", "_", name)
        return name, unit

    def _observer(self, figure: str) -> Callable[[Any], list[Any]]:
        from opentelemetry.metrics import Observation

        def observe(_: Any) -> list[Any]:
            found = {}
            for sample in self._asked_for(figure):
                labels = _labels(sample)
                found[tuple(labels.values())] = Observation(sample.values[figure], labels)
            return list(found.values())

        return observe

    def _asked_for(self, figure: str) -> list[Sample]:
        with self._lock:
            found = []
            for sample, unread in self._ended:
                if figure in unread:
                    unread.discard(figure)
                    found.append(sample)
            self._ended = [(sample, unread) for sample, unread in self._ended if unread]
            return found + [s for s in self._samples.values() if figure in s.values]


_instruments: weakref.WeakKeyDictionary[Any, _Instruments] = weakref.WeakKeyDictionary()
_early_meter: Any = None


def _global_meter() -> Any:
    """That of the global provider. Before there is one each call gives another, and their instruments would clash."""
    global _early_meter
    from opentelemetry import metrics

    meter = metrics.get_meter("brimful")
    if _early_meter is None and meter is not metrics.get_meter("brimful"):
        _early_meter = meter
    return meter if _early_meter is None else _early_meter


class OpenTelemetry:
    """Observable instruments of a meter, by default that of the global provider, whose reader asks for them.

    What is closed is read once more, by the next reader that asks. Needs ``pip install 'brimful[opentelemetry]'``.
    """

    def __init__(self, meter: Any = None) -> None:
        require("opentelemetry")
        self._meter = _global_meter() if meter is None else meter
        self._places = {id(self._meter)}
        self._instruments = shared(_instruments, self._meter, _Instruments)

    def write(self, sample: Sample) -> None:
        self._instruments.put(self._meter, sample)

    def close(self) -> None:
        pass


class TensorBoard:
    """Scalars ``brimful/...`` by step, of a ``SummaryWriter`` or of a new one for this folder.

    With a name of ``Metrics`` they are ``brimful-NAME/...``. A writer of the program's own stays open. Needs
    ``pip install 'brimful[tensorboard]'`` for a folder.
    """

    def __init__(self, writer: Any) -> None:
        self._owned = isinstance(writer, (str, os.PathLike))
        if self._owned:
            require("tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(os.fspath(writer))
        self._writer = writer
        folder = getattr(writer, "log_dir", None)
        self._places = {id(writer), os.path.realpath(folder) if folder else id(writer)}

    def write(self, sample: Sample) -> None:
        for name, value in sample.values.items():
            self._writer.add_scalar(f"{_prefix(sample)}/{name}", value, sample.step)

    def close(self) -> None:
        if self._owned:
            self._writer.close()
        elif callable(flush := getattr(self._writer, "flush", None)):
            flush()  # the program may have closed it before, and what is added then opens a file again


class _Run:
    """A run of Weights & Biases, and who writes to it."""

    def __init__(self) -> None:
        self.is_ours = False
        self.exporters: weakref.WeakSet[WandB] = weakref.WeakSet()


_runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()


class WandB:
    """``brimful/...`` in a run of Weights & Biases, with ``brimful/step`` as their axis.

    Without ``run`` one is begun with the other arguments, ``mode="offline"`` say, and finished by ``close()``. A run of
    the program's own stays open, and its steps are as they were: each row that the program logs has the newest sample.
    ``commit=True`` writes a row for each sample instead, for a program that logs nothing, or never with ``step=``. With
    a name of ``Metrics`` they are ``brimful-NAME/...``. Needs ``pip install 'brimful[wandb]'``.
    """

    def __init__(self, run: Any = None, *, commit: bool = False, **options: Any) -> None:
        is_new = False
        if run is None:
            require("wandb")
            import wandb

            before = wandb.run
            run = wandb.init(**options)
            is_new = run is not before  # W&B returns one that goes on
        self._run = run
        self._places = {id(run)}
        self._use = shared(_runs, run, _Run)
        self._use.is_ours |= is_new
        self._use.exporters.add(self)
        self._commit = commit
        self._axes: set[str] = set()
        self._define("brimful")
        self._last: dict[str, float] = {}
        self._samples = 0
        self._first_row: object = None
        self._has_rows = False  # samples are in several rows of the program's

    def _define(self, prefix: str) -> None:
        if prefix not in self._axes:
            self._axes.add(prefix)
            self._run.define_metric(f"{prefix}/step")
            self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def write(self, sample: Sample) -> None:
        prefix = _prefix(sample)
        self._define(prefix)
        values = {f"{prefix}/{name}": value for name, value in sample.values.items()}
        row = {f"{prefix}/step": sample.step, **values}
        if self._commit or self._use.is_ours:
            self._run.log(row)
            return
        self._last |= row
        self._samples += 1
        at = getattr(self._run, "step", self._samples)
        self._first_row = at if self._samples == 1 else self._first_row
        self._has_rows |= at != self._first_row
        # A row of its own would be a step of the run, and W&B would drop the program's steps, which would be late.
        self._run.log(row, commit=False)

    def close(self) -> None:
        self._use.exporters.discard(self)
        if self._use.is_ours:
            if not self._use.exporters:
                self._run.finish()
            return
        if self._samples == 0:
            return
        if self._samples > 1 and not self._has_rows:
            logging.getLogger("brimful").warning(
                "W&B has the last sample only, since the program logged no row of its own (samples: %d); "
                "WandB(run, commit=True) writes a row for each",
                self._samples,
            )
        if (summary := getattr(self._run, "summary", None)) is not None:
            summary.update(self._last)  # its row is written with the program's next one
