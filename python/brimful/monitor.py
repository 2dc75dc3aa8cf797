"""What holds memory on this machine, as a stream of samples: this process and its children, the host and the
container's limit, torch's allocators, the GPUs.

GPUs are read through NVIDIA's library in this process, without nvidia-smi, without a CUDA context, and without linking
it: on a machine without a driver it says so. What cannot be known (the other side of a container, a field that the
driver does not have) is ``None``, never 0.
"""

from __future__ import annotations

import atexit
import json as _json
import os
import weakref
from typing import Any, Protocol

from brimful import _C

__all__ = ["Monitor", "gpus", "prometheus_text", "sample"]


class _Writer(Protocol):
    def add_scalar(self, tag: str, value: float, step: int, /) -> object: ...


def sample(pid: int = 0) -> dict[str, Any]:
    """One sample of process ``pid`` (0: this one, with torch's memory) as a dict: bytes and seconds."""
    result: dict[str, Any] = _json.loads(_C._sample_json(pid))
    return result


def gpus() -> dict[str, Any]:
    """The GPUs alone: ``{"driver": ..., "gpu_problem": ..., "gpus": [...]}``."""
    result: dict[str, Any] = _json.loads(_C._gpus_json())
    return result


def prometheus_text() -> str:
    """One sample of this process in Prometheus' text format, for an endpoint of one's own."""
    return _C._sample_prometheus()


class Monitor:
    """Samples in a native thread, at once and then every ``interval_ms``, until ``stop()`` or the end of ``with``.

    ``json`` gets one JSON line a sample, appended; ``prometheus`` names a file that always holds the last sample, whole
    (for the node exporter's textfile collector); ``writer`` is anything with TensorBoard's ``add_scalar(tag, value,
    step)``, called from the monitor's thread. A place that fails is left out after one warning: training goes on.
    Raises ``ValueError`` if the interval is not positive.
    """

    def __init__(
        self,
        *,
        interval_ms: int = 1000,
        json: str | os.PathLike[str] | None = None,
        prometheus: str | os.PathLike[str] | None = None,
        writer: _Writer | None = None,
    ) -> None:
        self._core = _C._Monitor(interval_ms, _path(json), _path(prometheus), writer)
        _running.add(self)

    @property
    def samples(self) -> int:
        """Samples that have been taken and written."""
        return self._core.samples

    def stop(self) -> None:
        """Take a last sample, write it and end the thread. Again does nothing."""
        self._core.stop()
        _running.discard(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_running: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # A thread that calls a Python writer must have ended before the interpreter does.
    for monitor in list(_running):
        monitor.stop()


def _path(path: str | os.PathLike[str] | None) -> str:
    return "" if path is None else os.path.abspath(os.fspath(path))
