"""Hyper-parameter search that survives memory: thin functions around a Ray Tune or Optuna script as it is.

A trial that runs out of memory fails in Ray Tune, is tried again with the same config, and can even be the best result;
in Optuna it ends the study. Here it keeps its batch, in pieces, or ends as a trial that cannot win::

    tune.Tuner(search.guard(train_fn, metric="loss"), ...)      # Ray Tune
    study.optimize(search.guard(objective), n_trials=50)        # Optuna

Ray and Optuna are imported only where one of their objects is asked for (``resources``), or given.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from brimful import memory
from brimful._modules import unwrapped
from brimful._process_end import is_out_of_memory, text_of
from brimful.errors import explain
from brimful.finder import _clean
from brimful.memory._summary import _Step, summary
from brimful.monitor import gpus
from brimful.sizer import BatchSizer, _trial
from brimful.sizer._trial import Trial, WouldRunOut

__all__ = [
    "CUDA_CONTEXT_BYTES",
    "facts",
    "fraction",
    "guard",
    "memory_constraint",
    "probe",
    "resources",
    "wait_for_memory",
]

#: What a process takes of a GPU beside tensors. A trial's fraction has room for it, its limit leaves it out.
CUDA_CONTEXT_BYTES = 512 << 20

Config = Mapping[str, Any]
#: Peak bytes by the value of a key of the config, or a function of the config.
Peaks = Mapping[Any, int] | Callable[[Config], int]

_log = logging.getLogger("brimful")
_INFEASIBLE = 1e-3  # the least excess of a trial that ran out


@dataclass(frozen=True)
class _Options:
    on_oom: str
    metric: str | None
    mode: str
    limit: int | float | str | None
    peaks: Peaks | None
    key: str
    device: str | None


def guard(
    train_fn: Callable[..., Any],
    on_oom: str = "split",
    *,
    metric: str | None = None,
    mode: str = "min",
    limit: int | float | str | None = None,
    peaks: Peaks | None = None,
    key: str = "batch_size",
    device: str | None = None,
) -> Callable[..., Any]:
    """What to give to Ray Tune or ``study.optimize`` in the place of ``train_fn(config)`` or ``objective(trial)``.

    ``on_oom="split"``: a ``BatchSizer`` in ``train_fn`` splits batches as ever, so that the trial keeps the batch that
    it is to try. Under a limit it finds out before the first step if not even one row fits. A trial without a sizer, or
    that no split saves, ends as with ``"report"``: normally, with ``oom`` 1 and a metric that cannot win. In Ray Tune
    that is a last result with ``metric`` infinite, minus infinite for ``mode="max"``, which ``get_best_result`` leaves
    out; in Optuna the trial is pruned. ``on_oom="report"`` ends a trial so when its batch does not fit whole, before
    ``train_fn`` is called where ``peaks`` has them (Ray Tune only), before its first step where a sizer's plan does.
    ``"raise"`` passes the error on. What is no shortage of memory is always passed on.

    ``limit`` holds for the device while the trial runs: bytes, a fraction of the device's memory (a float), or
    ``"auto"``, see ``memory.set_limit``. Without it a trial of Ray Tune gets what its resources say: its fraction of a
    GPU, and ``memory`` for the CPU. ``device`` is CUDA's current one by default, or the CPU where there is none.

    A dict that ``train_fn`` returns and an Optuna trial's ``user_attrs`` get ``facts()``; in Optuna 5 the trial also
    gets the constraint ``"memory"`` where a limit is known. Peaks and limits are the process's: one trial at a time.

    Raises ``ValueError`` for another ``on_oom`` or ``mode``, for a fraction above 1, and in Ray Tune without a
    ``metric``; ``TypeError`` for a class, a generator function, and for what is no function.
    """
    if inspect.isclass(train_fn) or inspect.isgeneratorfunction(train_fn) or not callable(train_fn):
        raise TypeError(
            f"train_fn must be a function that reports or returns its metrics (train_fn: {train_fn!r})"
        )
    for name, value, known in (
        ("on_oom", on_oom, ("split", "report", "raise")),
        ("mode", mode, ("min", "max")),
    ):
        if value not in known:
            raise ValueError(f"no such {name} ({name}: {value!r}); use one of {', '.join(known)}")
    if isinstance(limit, float) and not 0 < limit <= 1:
        raise ValueError(
            f"a fraction of a device's memory is above 0 and at most 1 (limit: {limit}); an int is bytes"
        )
    options = _Options(on_oom, metric, mode, limit, peaks, key, device)

    @functools.wraps(train_fn)
    def guarded(trial: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(options, train_fn, trial, args, kwargs)

    return guarded


def facts() -> dict[str, int]:
    """What this trial took so far, for ``tune.report({"loss": loss, **search.facts()})``; empty outside of a trial.

    ``oom``; ``effective_batch``, the rows of the largest step of its sizers; ``pieces``, the most that a step was split
    into (0 where no sizer stepped); ``peak_bytes`` of the process, or what was predicted where nothing was run.
    """
    trial = _trial.current()
    return {} if trial is None else trial.facts()


def probe(build: Callable[[Config], tuple[Any, ...]]) -> Callable[[Config], int]:
    """``peaks`` from a model: a function that returns the bytes at the peak of a whole step with a config.

    ``build(config)`` returns ``(model, batch, loss_fn)``, or with the optimizer after them; ``loss_fn(model, batch)``.
    A few rows are run, see ``BatchSizer.plan``; where memory follows no law, the batch. Each config is asked for once.
    On CUDA it is what torch's allocator reserves, as a limit counts it, and where neither a few rows nor the batch can
    be run, all that the device has. Peaks on the CPU are only near those of a GPU,
    whose allocator takes whole segments, and whose libraries other workspaces.
    """
    known: dict[str, int] = {}

    def peak_bytes(config: Config) -> int:
        name = repr(sorted(config.items()))
        if name not in known:
            _clean()
            known[name] = _probed(build, config)
        return known[name]

    return peak_bytes


def _probed(build: Callable[[Config], tuple[Any, ...]], config: Config) -> int:
    before = {on: memory.stats(on).reserved_bytes for on in _devices_in_use()}
    try:
        model, batch, loss_fn, optimizer = (*build(config), None)[:4]
        device, peak_bytes = _whole_bytes(model, batch, loss_fn, optimizer)
        if peak_bytes is None:
            _clean()
            with _trial.unlimited(device):
                peak_bytes = (
                    _most_reserved(model, batch, loss_fn, optimizer, device)
                    if device.type == "cuda"
                    else summary(model, batch, loss_fn=loss_fn, optimizer=optimizer).peak_bytes
                )
        return peak_bytes - before.get(device, 0)
    except Exception as error:  # also where the batch alone is too large
        if not is_out_of_memory(error) or "CUDA" not in text_of(error):
            raise
        return _free_and_total(_device(None))[1]


def _whole_bytes(
    model: Any, batch: Any, loss_fn: Any, optimizer: Any
) -> tuple[torch.device, int | None]:
    """The model's device, and by a plan what the batch takes there in one piece."""
    sizer = BatchSizer(model, optimizer, local=True)
    planned = _trial.without_limit(lambda: sizer.plan(batch, loss_fn), sizer._device)
    return sizer._device, None if planned is None else planned.whole_bytes


def _most_reserved(
    model: Any, batch: Any, loss_fn: Any, optimizer: Any, device: torch.device
) -> int:
    """By torch's allocator in a step of the model, which is the probe's own and need not stay as it is."""
    step = _Step(unwrapped(model), loss_fn, optimizer, True, None)
    _clean()
    torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng([device]):
        for _ in range(2):  # the first one makes the optimizer's state
            step.run(batch)
            step.model.zero_grad()
    return torch.cuda.max_memory_reserved(device)


def fraction(peak_bytes: int, total_bytes: int, headroom: float = 1.15) -> float:
    """The part of a device that a trial needs, rounded up to Ray's unit, 1/10,000; 1 for what does not fit."""
    if headroom < 1:
        raise ValueError(f"headroom is a factor of 1 and more (headroom: {headroom})")
    if total_bytes <= 0 or peak_bytes < 0:
        raise ValueError(
            f"a trial's bytes must not be negative, nor a device's be 0 (peak_bytes: {peak_bytes}, "
            f"total_bytes: {total_bytes})"
        )
    return min(1.0, math.ceil(peak_bytes * headroom * 10_000 / total_bytes) / 10_000)


def resources(
    peaks: Peaks,
    headroom: float = 1.15,
    *,
    key: str = "batch_size",
    device: str = "cuda",
    total_bytes: int | None = None,
    cpus: float = 1,
) -> Callable[[Config], Any]:
    """For ``tune.with_resources``: as many trials run at once as fit by ``peaks``, measured or from a ``probe``.

    On CUDA a trial asks for the fraction ``(peak + CUDA_CONTEXT_BYTES) * headroom / total_bytes`` of a GPU
    (``total_bytes``: by default that of the smallest GPU here). A trial that is larger gets a GPU to itself, for
    ``guard`` to split or to report, and is logged. With ``device="cpu"`` it asks for ``memory``, Ray's name for the
    host's. Ray only counts; ``guard`` makes the trial keep to it.

    Raises ``ValueError`` for a headroom below 1, without a GPU where ``total_bytes`` is not given, and for a config
    that ``peaks`` does not know; ``ImportError`` without Ray.
    """
    tune = _imported("ray.tune", "ray")
    fraction(0, 1, headroom)
    on_gpu = torch.device(device).type == "cuda"
    total = (total_bytes or _smallest_gpu_bytes()) if on_gpu else 0

    def of_trial(config: Config) -> Any:
        peak = _peak_of(peaks, config, key)
        if not on_gpu:
            need: dict[str, float] = {"memory": math.ceil(peak * headroom)}
        else:
            taken = peak + CUDA_CONTEXT_BYTES
            need = {"GPU": fraction(taken, total, headroom)}
            if taken > total:
                _log.warning(
                    "a trial takes more than a GPU and gets one to itself (peak_bytes: %d, total_bytes: %d, "
                    "config: %s)",
                    peak,
                    total,
                    config,
                )
        return tune.PlacementGroupFactory([{"CPU": cpus, **need}])

    return of_trial


def memory_constraint(limit_bytes: int) -> Callable[[Any], tuple[float]]:
    """For ``constraints_func`` of Optuna's samplers: above 0 for trials that took more than the limit, or ran out.

    Of trials whose objective is guarded. In Optuna 5, where ``constraints_func`` is deprecated, ``guard`` says the same
    by ``trial.set_constraint``.
    """
    if limit_bytes <= 0:
        raise ValueError(f"a limit is above 0 (limit_bytes: {limit_bytes})")

    def constraint(trial: Any) -> tuple[float]:
        if "peak_bytes" not in trial.user_attrs:
            raise ValueError(
                f"the trial has no peak_bytes (trial: {trial.number}); give optimize() a guarded objective"
            )
        return (_excess(trial.user_attrs, limit_bytes),)

    return constraint


def wait_for_memory(
    bytes: int,
    timeout_s: float = 60,
    *,
    device: str | torch.device | None = None,
    interval_s: float = 1,
) -> None:
    """Return as soon as the device has so many bytes free, where other processes are about to give them back.

    Takes the place of ``ray.tune.utils.wait_for_gpu``, and needs neither GPUtil nor a CUDA context. On the CPU it is
    what the container or the host has left (``memory.system_limit``). Raises ``TimeoutError`` after ``timeout_s``.
    """
    on = _device_to_wait_for(device)
    deadline = time.monotonic() + timeout_s
    while True:
        free, total = _free_and_total(on)
        if free >= bytes:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{on} has too little memory free after {timeout_s:g} s (bytes: {bytes:,}, free: {free:,} of "
                f"{total:,}); `brimful top` shows who holds it"
            )
        time.sleep(min(interval_s, left))


def _run(
    options: _Options, train_fn: Callable[..., Any], trial: Any, args: Any, kwargs: Any
) -> Any:
    of_ray = isinstance(trial, Mapping)
    _check_trial(options, trial, of_ray)
    device = _device(options.device)
    _clean()  # of what the trial before left in this process
    with _limited(options, device, of_ray), Trial(device, options.on_oom == "report") as seen:
        try:
            if of_ray and options.peaks is not None and options.on_oom == "report":
                _predict(_peak_of(options.peaks, trial, options.key), device)
            result = train_fn(trial, *args, **kwargs)
            return {**seen.facts(), **result} if isinstance(result, dict) else result
        except Exception as error:
            if not _ran_out(error):
                raise
            seen.ran_out(error)
            if options.on_oom == "raise":
                raise
            message = text_of(error).splitlines()[0]
        finally:
            found = seen.facts()
            if not of_ray:
                _report_to_optuna(trial, found, memory.stats(device).limit_bytes)
    _clean()
    if options.on_oom == "split" and not seen.has_sizer:
        message += " (no brimful.BatchSizer stepped in it, which splits batches)"
    _log.warning("a trial ran out of memory and cannot win: %s", message)
    if of_ray:
        worst = math.inf if options.mode == "min" else -math.inf
        return {**found, "oom_message": message, options.metric: worst}
    trial.set_user_attr("oom_message", message)
    raise _imported("optuna", "optuna").TrialPruned(message)


def _check_trial(options: _Options, trial: Any, of_ray: bool) -> None:
    if not of_ray and not hasattr(trial, "set_user_attr"):
        raise TypeError(
            f"a guarded function is called with a Ray Tune config or an Optuna trial (type: {type(trial)})"
        )
    if of_ray and options.metric is None and options.on_oom != "raise":
        raise ValueError(
            "Ray Tune needs a metric for a trial that ran out (metric: None); name the one that is reported: "
            'guard(train_fn, metric="loss")'
        )
    if not of_ray and options.peaks is not None:
        raise ValueError(
            "an Optuna trial has no config to look up before its objective runs (peaks: given); leave peaks out"
        )


def _ran_out(error: Exception) -> bool:
    return is_out_of_memory(error) or (
        isinstance(error, RuntimeError) and explain(error).is_memory is True
    )


def _predict(peak_bytes: int, device: torch.device) -> None:
    limit_bytes = memory.stats(device).limit_bytes
    if limit_bytes is not None and peak_bytes > limit_bytes:
        raise WouldRunOut(peak_bytes, limit_bytes)


def _report_to_optuna(trial: Any, found: Mapping[str, int], limit_bytes: int | None) -> None:
    for name, value in found.items():
        trial.set_user_attr(name, value)
    if limit_bytes and hasattr(trial, "set_constraint"):
        trial.set_constraint("memory", _excess(found, limit_bytes))


def _excess(found: Mapping[str, int], limit_bytes: int) -> float:
    """By how much of the limit a trial is above it; its peak is below where memory ran out."""
    excess = found["peak_bytes"] / limit_bytes - 1
    return max(excess, _INFEASIBLE) if found.get("oom") else excess


def _peak_of(peaks: Peaks, config: Config, key: str) -> int:
    if callable(peaks):
        return int(peaks(config))
    if key not in config:
        raise ValueError(
            f"the search space does not have the key of the peaks (key: {key!r}, space: {sorted(config)}); "
            "name the right one by key="
        )
    if config[key] not in peaks:
        raise ValueError(
            f"no peak is known of this trial ({key}: {config[key]!r}, known: {list(peaks)}); measure it, or give "
            "a function of the config"
        )
    return int(peaks[config[key]])


@contextmanager
def _limited(options: _Options, device: torch.device, of_ray: bool) -> Iterator[None]:
    """The limits of the trial, and those from before when it has ended."""
    limits: dict[torch.device, Any] = {}
    if options.limit is not None:
        limits[device] = (
            int(options.limit * _free_and_total(device)[1])
            if isinstance(options.limit, float)
            else options.limit
        )
    elif of_ray:
        given = _ray_resources()
        if "memory" in given:
            limits[torch.device("cpu")] = int(given["memory"])
        if device.type == "cuda" and 0 < given.get("GPU", 0) < 1:
            share = int(given["GPU"] * _free_and_total(device)[1])
            limits[device] = max(0, share - CUDA_CONTEXT_BYTES)
    before = {on: memory.stats(on).limit_bytes for on in limits}
    try:
        for on, limit in limits.items():
            memory.set_limit(on, limit)
        yield
    finally:
        for on, old in before.items():
            memory.set_limit(on, old)


def _ray_resources() -> Mapping[str, float]:
    """What Ray counts for this trial; nothing outside of one."""
    if "ray.tune" not in sys.modules:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no trial
        given = sys.modules["ray.tune"].get_context().get_trial_resources()
    return {} if given is None else dict(given.required_resources)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device or "cpu")


def _device_to_wait_for(device: str | torch.device | None) -> torch.device:
    """Without asking CUDA: the caller may choose devices, or fork, behind the wait."""
    if device is not None or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _device(device)
    visible = [gpu["cuda_index"] for gpu in gpus()["gpus"] if gpu["cuda_index"] is not None]
    return torch.device("cuda", min(visible)) if visible else torch.device("cpu")


def _devices_in_use() -> list[torch.device]:
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.device("cpu"), *([_device(None)] if cuda else [])]


def _free_and_total(device: torch.device) -> tuple[int, int]:
    if device.type == "cpu":
        limit = memory.system_limit()
        return limit.free_bytes, limit.limit_bytes
    for gpu in gpus()["gpus"]:
        if gpu["cuda_index"] == (device.index or 0) and gpu["free_bytes"] is not None:
            return gpu["free_bytes"], gpu["total_bytes"]
    return torch.cuda.mem_get_info(device)


def _smallest_gpu_bytes() -> int:
    found = [gpu["total_bytes"] for gpu in gpus()["gpus"] if gpu["total_bytes"]]
    if not found:
        raise ValueError("there is no GPU to take a fraction of (GPUs: 0); pass total_bytes")
    return int(min(found))


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is not installed; run: pip install 'brimful[{extra}]'"
        ) from error
