"""Numbers in torch's messages have a point, whatever locale the program has set."""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import locale, sys
import torch, brimful

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.68 GiB of which 1.20 GiB is "
    "free. Process 1234 has 20.00 GiB memory in use. Of the allocated memory 10.50 GiB is allocated by PyTorch, and "
    "9.25 GiB is reserved by PyTorch but unallocated."
)

def texts():
    return str(brimful.explain(torch.OutOfMemoryError(MESSAGE)))

before = texts()
locale.setlocale(locale.LC_ALL, sys.argv[1])
assert locale.localeconv()["decimal_point"] == ","
assert texts() == before, (texts(), before)
assert "fragment" in before, before
"""


@pytest.fixture
def german(tmp_path):
    """A locale with a decimal comma, for LOCPATH."""
    localedef = shutil.which("localedef")
    if localedef is None:
        pytest.skip("needs localedef, which makes a locale with a decimal comma")
    made = tmp_path / "de_DE.UTF-8"
    command = [localedef, "--no-archive", "-i", "de_DE", "-f", "UTF-8", str(made)]
    if subprocess.run(command, capture_output=True, timeout=60).returncode > 1 or not made.exists():
        pytest.skip("needs the sources of locales (/usr/share/i18n)")
    return tmp_path


def test_a_decimal_comma_changes_no_reading_of_torchs_messages(german):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "de_DE.UTF-8"],
        env={**os.environ, "LOCPATH": str(german)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
