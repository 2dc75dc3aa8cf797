"""examples/search.py, as a reader runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SEARCH = Path(__file__).resolve().parent.parent.parent / "examples" / "search.py"

pytestmark = pytest.mark.timeout(400)


def search(searcher, folder, *options):
    done = subprocess.run(
        [sys.executable, SEARCH, searcher, "--folder", folder, "--samples", "1024", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(printed):
    """Batch, effective batch and pieces of each trial of the table that is printed at the end."""
    row = r"\b(64|256|1024)\b[^\d\n]+\d+[^\d\n]+\d[^\d\n]+0\.\d+[^\d\n]+(\d+)[^\d\n]+(\d+)[^\d\n]+[\d.]+ MiB"
    return [tuple(map(int, found)) for found in re.findall(row, printed)]


def check(printed, trials):
    assert re.search(r"^9 of 27 configs need more than the budget", printed, re.M)
    assert "failed trials: 0" in printed
    rows = rows_of(printed)
    assert len(rows) == trials, printed
    assert all(batch == effective for batch, effective, _ in rows)
    return [pieces for *_, pieces in rows]


def test_a_study_of_optuna_keeps_batches_that_do_not_fit(tmp_path):
    pytest.importorskip("optuna")
    pytest.importorskip("tensorboard")
    pieces = check(search("tpe", tmp_path, "--trials", "6", "--epochs", "1"), 6)
    assert max(pieces) > 1
    assert list((tmp_path / "tpe").glob("trial_*/events.*"))


@pytest.mark.slow
def test_a_search_of_ray_keeps_them_too(tmp_path):
    pytest.importorskip("ray.tune")
    check(search("asha", tmp_path, "--trials", "4", "--epochs", "2"), 4)
    assert list((tmp_path / "asha").glob("train_fn_*/events.*"))
