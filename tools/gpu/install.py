"""Makes brimful importable by this Python: as it is installed, from a wheel that fits, or built from this source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.gpu.catalogue import ROOT

SITE = ROOT / "build" / "gpu" / "site"
MACHINE = """
import json, sys, torch, brimful, ctypes
here = torch.cuda.is_available()
try:
    free_bytes = torch.cuda.mem_get_info()[0] if here else 0
except RuntimeError:  # others hold all of the device
    free_bytes = 0
print(json.dumps({
    "brimful": brimful.__version__, "torch": torch.__version__, "python": sys.version.split()[0],
    "device": torch.cuda.get_device_name(0) if here else None,
    "free_bytes": free_bytes,
    "simulated": hasattr(ctypes.CDLL(None), "sim_cuda_calls"),
}))
"""


def machine() -> str | None:
    """brimful, torch, Python and device as JSON, as a fresh process sees them; None where there is no brimful."""
    done = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else None


def use_site() -> None:
    """What was installed here by an earlier run comes first."""
    if SITE.exists():
        paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def install(wheel: Path | None) -> str:
    """Puts `wheel`, a wheel of dist/ or this source, built, into build/gpu/site. What went wrong, if it did."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = [wheel] if wheel else sorted((ROOT / "dist").glob(f"brimful-*{tag}-*.whl"))
    said = []
    # Without the network: what the build needs (pyproject.toml) has to be there.
    for source in [*wheels, *([] if wheel else [ROOT])]:
        print(f"installing {source}", flush=True)
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--upgrade"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, "--target", SITE, source],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        use_site()
        if done.returncode == 0 and machine():
            return ""
        said.append(f"{source}: {done.stdout[-2000:]}")
    return "\n".join(said)
