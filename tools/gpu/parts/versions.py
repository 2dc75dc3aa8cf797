"""Versions, the device, and what `brimful doctor` finds."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch
from tools.gpu.check import Check, check
from tools.gpu.device import SIMULATED


def run(small: bool) -> Iterator[Check]:
    """Yields one check of the versions and one for each of the doctor's lines."""
    import brimful
    from brimful.cli import doctor

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    facts = {
        "brimful": brimful.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": total,
        "free_bytes": free,
        "simulated": SIMULATED,
    }
    words = ", ".join(f"{name} {value}" for name, value in facts.items())
    yield check("versions", torch.cuda.is_available(), words, **facts)
    for finding in doctor.findings():
        yield check(f"doctor: {finding.name}", finding.health != "fail", finding.found)
