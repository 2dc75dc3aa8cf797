"""Where samples go. Each exporter has ``write(sample)`` and ``close()``, both called from one thread of brimful's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from brimful.integrations._extra import require
from brimful.metrics._figures import HELP, Sample


class Exporter(Protocol):
    """One of the classes below, or one of your own."""

    def write(self, sample: Sample, /) -> object: ...

    def close(self) -> object: ...


def _help(name: str) -> str:
    return HELP.get(name, "A figure of the program's own")


class JsonLines:
    """One JSON line a sample, appended to the file of this rank, ``rank-00003.jsonl``, in the folder ``path``.

    ``brimful top --job FOLDER`` shows such a folder. It is made where it is not there. A ``path`` that ends in
    ``.jsonl`` is the file itself.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._is_folder = self._path.suffix != ".jsonl"
        (self._path if self._is_folder else self._path.parent).mkdir(parents=True, exist_ok=True)

    def write(self, sample: Sample) -> None:
        header = {
            "time": round(sample.time, 3),
            "job": sample.job,
            "host": sample.host,
            "pid": sample.pid,
            "rank": sample.rank,
            "world_size": sample.world_size,
            "step": sample.step,
            "ended": sample.ended,
        }
        line = {**header, **sample.values, **header}
        name = f"rank-{sample.rank:05}.jsonl"
        path = self._path / name if self._is_folder else self._path
        # Opened each time: a folder that another program has moved or a full disk is a matter of one sample.
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        pass


class Prometheus:
    """The last sample under ``http://addr:port/metrics``, in a file for the node exporter, or both.

    ``port=0`` takes any free one, and ``.port`` says which. Ranks of one host need a port each. ``textfile`` names a
    file that always holds the last sample, whole. ``registry`` is that of ``prometheus_client`` to join, where the
    program has its own endpoint. Needs ``pip install 'brimful[prometheus]'``.
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
        self._textfile = None if textfile is None else os.path.abspath(textfile)
        self._registry = prometheus_client.CollectorRegistry() if registry is None else registry
        self._last: Sample | None = None
        self._registry.register(self)
        self._server: Any = None
        self.port = port
        if port is not None:
            self._server, _ = prometheus_client.start_http_server(port, addr, self._registry)
            self.port = self._server.server_port

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        """As prometheus_client asks a collector, from any thread."""
        sample = self._last
        if sample is None:
            return
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = {"job_name": sample.job, "rank": str(sample.rank)}
        values = {**sample.values, "last_sample_timestamp_seconds": sample.time}
        for name, value in values.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            found = family(f"brimful_{name}", _help(name), labels=list(labels))
            found.add_metric(list(labels.values()), value)
            yield found

    def write(self, sample: Sample) -> None:
        self._last = sample
        if self._textfile is not None:
            self._library.write_to_textfile(self._textfile, self._registry)

    def close(self) -> None:
        self._registry.unregister(self)
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


class OpenTelemetry:
    """Observable instruments of a meter, by default that of the global provider, whose reader asks for them.

    Needs ``pip install 'brimful[opentelemetry]'``.
    """

    def __init__(self, meter: Any = None) -> None:
        require("opentelemetry")
        from opentelemetry import metrics

        self._observation = metrics.Observation
        self._meter = metrics.get_meter("brimful") if meter is None else meter
        self._last: Sample | None = None
        self._known: set[str] = set()

    def write(self, sample: Sample) -> None:
        self._last = sample
        for name in sample.values.keys() - self._known:
            self._known.add(name)
            counts = name.endswith("_total")
            create = (
                self._meter.create_observable_counter
                if counts
                else self._meter.create_observable_gauge
            )
            otel_name, unit = _otel_name(name)
            create(otel_name, [self._observer(name)], unit=unit, description=_help(name))

    def _observer(self, name: str) -> Callable[[Any], list[Any]]:
        def observe(_: Any) -> list[Any]:
            sample = self._last
            if sample is None or name not in sample.values:
                return []
            labels = {"job": sample.job, "rank": sample.rank}
            return [self._observation(sample.values[name], labels)]

        return observe

    def close(self) -> None:
        self._last = None


class TensorBoard:
    """Scalars ``brimful/...`` by step, of a ``SummaryWriter`` or of a new one for this folder.

    A writer of the program's own stays open. Needs ``pip install 'brimful[tensorboard]'`` for a folder.
    """

    def __init__(self, writer: Any) -> None:
        self._owned = isinstance(writer, (str, os.PathLike))
        if self._owned:
            require("tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(os.fspath(writer))
        self._writer = writer

    def write(self, sample: Sample) -> None:
        for name, value in sample.values.items():
            self._writer.add_scalar(f"brimful/{name}", value, sample.step)

    def close(self) -> None:
        if self._owned:
            self._writer.close()


class WandB:
    """``brimful/...`` in a run of Weights & Biases, with ``brimful/step`` as their axis.

    Without ``run`` one is begun with the other arguments, ``mode="offline"`` say, and finished by ``close()``. A run of
    the program's own stays open, and its steps are as they were. Needs ``pip install 'brimful[wandb]'``.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self._owned = run is None
        if run is None:
            require("wandb")
            import wandb

            run = wandb.init(**options)
        self._run = run
        run.define_metric("brimful/step")
        run.define_metric("brimful/*", step_metric="brimful/step")

    def write(self, sample: Sample) -> None:
        values = {f"brimful/{name}": value for name, value in sample.values.items()}
        self._run.log({"brimful/step": sample.step, **values})

    def close(self) -> None:
        if self._owned:
            self._run.finish()
