"""Programs on an H200 without arithmetic that change no file of the machine."""

import json
import subprocess
import sys

import pytest
from simulation import RUN, outside


def run_guarded(libraries, folder, scratch, *command, **environment):
    """Runs a command in a folder: what it said, and what its last line says in JSON."""
    # torch 2.11 keeps workspaces, one for each thread
    chosen = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", **environment}
    options = ["--libraries", libraries, "--device", "h200", "--guard", scratch]
    done = subprocess.run(
        [sys.executable, RUN, *options, "--", *command],
        env={**outside(), **chosen},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    said = done.stdout + done.stderr
    if "is refused outside of" in said:
        pytest.skip("this system redirects no files")
    assert done.returncode == 0, said
    return said, json.loads(done.stdout.splitlines()[-1])
