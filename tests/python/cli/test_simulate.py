"""`brimful simulate`: a program on CUDA devices that are libraries of this package."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import brimful
from brimful.cli import simulate

LIBRARIES = Path(brimful.__file__).with_name("cuda_sim")
built = pytest.mark.skipif(
    not (LIBRARIES / "libcudart.so.13").exists(), reason="the simulated device is not built"
)
SHOW = (
    "import torch; print(torch.cuda.get_device_name(), torch.ones(3, device='cuda').sum().item())"
)
TOO_LARGE = "import torch; torch.empty(30 << 30, dtype=torch.uint8, device='cuda')"


def run(*arguments):
    """Its status, stdout and stderr."""
    # The package may be found by a path file, which another folder's Python has too.
    left_out = ("LD_PRELOAD", "SIM_CUDA_ARITHMETIC", "SIM_CUDA_DEVICE", "SIM_CUDA_MEMORY_MB")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-m", "brimful", "simulate", *arguments],
        env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


@built
def test_a_program_computes_there():
    status, out, err = run("--", sys.executable, "-c", SHOW)
    assert (status, out.split()[-1]) == (0, "3.0"), err


@built
@pytest.mark.parametrize(("device", "status"), [("l4", 1), ("h200", 0), ("48GiB,sms=84,cc=8.6", 0)])
def test_a_program_fits_or_does_not(device, status):
    found, _, err = run("--device", device, "--", sys.executable, "-c", TOO_LARGE)
    assert found == status, err
    assert ("OutOfMemoryError" in err) == (status == 1)


@built
def test_its_files_stay(tmp_path):
    kept = tmp_path / "model.pt"
    kept.write_text("trained")
    write = f"open({str(kept)!r}, 'w').write('nothing')"
    guard = ("--guard", str(tmp_path / "scratch"))
    status, _, err = run("--device", "h200", *guard, "--", sys.executable, "-c", write)
    assert kept.read_text() == "trained"
    assert status == 0 or "PermissionError" in err  # where the system redirects no files


@built
def test_a_command_needs_no_dashes_before_it():
    status, out, err = run("--device", "t4", sys.executable, "-c", SHOW, "--device", "h200")
    assert (status, out) == (0, "Tesla T4 3.0\n"), err


@built
def test_what_it_cannot_do_is_said():
    status, _, err = run("--device", "h200")
    assert status == 2
    assert err.endswith("error: name the program to run: -- python train.py\n")
    status, _, err = run("--", "no-such-program")
    assert (status, err) == (
        127,
        "brimful simulate: there is no such program (command: no-such-program)\n",
    )
    status, _, err = run("--interval", "--", sys.executable, "-c", "")
    assert status == 1
    assert err.splitlines()[-1] == (
        "brimful simulate: --interval is for devices without arithmetic: name one by --device"
    )
    status, _, err = run("--device", "h2000", "--", sys.executable, "-c", SHOW)
    assert status != 0
    assert "h2000" in err


def test_a_package_without_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(brimful, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(runpy, "run_path", None)
    assert simulate.main(["--", "true"]) == 2
    assert "it is built where torch is for CUDA 13" in capsys.readouterr().err
