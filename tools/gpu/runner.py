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

from tools.gpu.catalogue import ROOT, Part
from tools.gpu.check import Check, read

LAST_WORDS = 600  # characters of what a process said that ended early

_running: set[int] = set()  # the processes of parts, each the first of a group


def run_part(
    part: Part, small: bool, limit_s: float | None = None, logs: Path | None = None
) -> tuple[list[Check], float]:
    """The part's checks and its seconds. A process that ends early, or is not done in time, is a check `ended`.

    What it prints is kept in the folder `logs`.
    """
    limit_s = part.limit_s if limit_s is None else min(limit_s, part.limit_s)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checks"
        log = (logs or Path(folder)) / f"{part.name.replace('/', '.')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
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
            _running.add(process.pid)
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
        _end(process.pid)
        process.wait()
        _running.discard(process.pid)
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""


def end_all() -> None:
    """Ends the parts that other threads run."""
    for pid in tuple(_running):
        _end(pid)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
