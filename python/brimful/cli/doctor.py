"""``brimful doctor``: is this machine fit for training? Each line says ok, warn or fail, and what to do."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from brimful import _C
from brimful._log import text_of

__all__ = ["Finding", "findings", "main"]


class Finding(NamedTuple):
    """One thing that was looked at. ``health`` is "ok", "warn" or "fail"."""

    name: str
    health: str
    found: str
    remedy: str = ""


def findings() -> list[Finding]:
    """Look at torch, CUDA, NCCL, gloo, brimful's build, the limits of this process, its port, and the GPUs.

    Starts no CUDA context.
    """
    cuda_wanted = torch.version.cuda is not None
    machine = [Finding(*line) for line in _C._check_machine(cuda_wanted)]
    checks: list[Callable[[], Finding]] = [_torch, _cuda(machine), _cudnn, _nccl, _gloo]
    return [_tried(check) for check in checks] + machine


def _tried(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # the doctor reports what is broken, and goes on
        name = getattr(check, "__name__", "check").strip("_")
        line = (text_of(error).strip().splitlines() or [""])[0]
        return Finding(name, "fail", f"{type(error).__name__}: {line}", "install torch again")


def _torch() -> Finding:
    return Finding("torch", "ok", f"{torch.__version__}, Python {platform.python_version()}")


def _cuda(machine: list[Finding]) -> Callable[[], Finding]:
    def cuda() -> Finding:
        if torch.version.cuda is None:
            return Finding("CUDA", "ok", "torch is built for the CPU")
        count = torch.cuda.device_count()
        built = f"torch is built for CUDA {torch.version.cuda}"
        if count > 0:
            return Finding("CUDA", "ok", f"{built}, devices: {count}")
        if any(line.name.startswith("GPU ") and line.health == "ok" for line in machine):
            remedy = "see CUDA_VISIBLE_DEVICES, and whether the driver is new enough for this CUDA"
            return Finding("CUDA", "fail", f"{built}, and sees none of the GPUs below", remedy)
        return Finding("CUDA", "warn", f"{built}, and there is no device", "train on the CPU")

    return cuda


def _cudnn() -> Finding:
    if torch.version.cuda is None:
        return Finding("cuDNN", "ok", "not needed")
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is None:
        return Finding(
            "cuDNN", "warn", "absent", "install a torch that has it: convolutions are slow"
        )
    return Finding("cuDNN", "ok", str(version))


def _nccl() -> Finding:
    if torch.version.cuda is None:
        return Finding("NCCL", "ok", "not needed")
    if not dist.is_available() or not dist.is_nccl_available():
        return Finding(
            "NCCL", "warn", "absent", "ranks on GPUs need a torch that is built with NCCL"
        )
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return Finding("NCCL", "ok", ".".join(map(str, version)))


def _gloo() -> Finding:
    """A group of one rank that reduces: it finds the host's name and an interface, or fails as training would."""
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("gloo", "fail", "absent", "install a torch that is built with gloo")
    try:
        timeout = datetime.timedelta(seconds=20)
        store = dist.HashStore()  # type: ignore[attr-defined]
        group = dist.ProcessGroupGloo(store, 0, 1, timeout)
        group.allreduce([torch.ones(1)]).wait()  # type: ignore[attr-defined]
    except RuntimeError as error:
        line = text_of(error).strip().splitlines()[0]
        remedy = "set GLOO_SOCKET_IFNAME to an interface that is up (ip link), lo on one host"
        return Finding("gloo", "fail", line, remedy)
    return Finding("gloo", "ok", "a group of one rank reduces")


def main(arguments: Sequence[str]) -> int:
    """Print the findings; 1 if one of them failed, else 0."""
    parser = argparse.ArgumentParser(prog="brimful doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list")
    given = parser.parse_args(arguments)
    found = findings()
    if given.json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        width = max(len(finding.name) for finding in found)
        for finding in found:
            print(f"{finding.health:4}  {finding.name:{width}}  {finding.found}")
            if finding.remedy and finding.health != "ok":
                print(f"      {'':{width}}  -> {finding.remedy}")
    return int(any(finding.health == "fail" for finding in found))
