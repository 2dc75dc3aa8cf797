"""Runs a part in a process of its own, so that what breaks there ends that part alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.gpu.catalogue import Part
from tools.gpu.check import Check, read

ROOT = Path(__file__).resolve().parents[2]
LAST_WORDS = 600  # characters of what a process said that ended early


def run_part(part: Part, small: bool, limit_s: float | None = None) -> tuple[list[Check], float]:
    """The part's checks and its seconds. A process that ends early, or is not done in time, is a check `ended`."""
    limit_s = part.limit_s if limit_s is None else min(limit_s, part.limit_s)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "checks", Path(folder) / "log"
        command = [sys.executable, "-m", "tools.gpu.child", part.module, str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command + ["--small"] * small,
                cwd=ROOT,
                env={**os.environ, **part.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ended = _wait(process, limit_s)
        checks = read(file)
        if ended:
            said = log.read_text(errors="replace")[-LAST_WORDS:].strip()
            checks.append(Check("part", "ended", f"{ended}; it said: {said}" if said else ended))
    return checks, time.monotonic() - began


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How the process ended early, else nothing. Its children go with it."""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done in {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""
