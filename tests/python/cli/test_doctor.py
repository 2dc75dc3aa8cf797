"""What `brimful doctor` says of this build of brimful."""

import json
import os
import subprocess
import sys

import pytest
import torch

import brimful
from brimful import _build_info


@pytest.mark.smoke
def test_the_doctor_says_what_brimful_was_built_with():
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "brimful", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    (line,) = (line for line in json.loads(done.stdout) if line["name"] == "brimful")
    cuda, gloo = ("yes" if built else "no" for built in (_build_info.cuda, _build_info.gloo))
    built = f"built with CUDA: {cuda}, NCCL: {cuda}, gloo: {gloo}"
    assert line["found"] == f"{brimful.__version__}, {built}"
    whole = _build_info.gloo and (_build_info.cuda or torch.version.cuda is None)
    assert line["health"] == ("ok" if whole else "warn")
    assert bool(line["remedy"]) != whole
