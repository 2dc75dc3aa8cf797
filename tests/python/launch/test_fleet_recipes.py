"""The example of a job that comes back, under torchrun and Slurm: from its checkpoint on no row is lost or doubled."""

import json
import os
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from brimful.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "train_fleet.py"
SLURM = ROOT / "examples" / "train_fleet.slurm"
ROWS, BATCH, EPOCHS = 700, 64, 2
STEPS = EPOCHS * 11
#: Restarted ranks would find the addresses of those before them in the store that torchrun keeps.
ELASTIC = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
OPTIONS = ["--rows", str(ROWS), "--batch", str(BATCH), "--epochs", str(EPOCHS), "--every", "4"]


def rows_by_step(folder):
    """All rows of each step as they were logged, run by run."""
    by_step = defaultdict(list)
    for file in sorted(folder.glob("rows-*.jsonl")):
        seen = defaultdict(list)
        for line in map(json.loads, file.read_text().splitlines()):
            seen[line["step"]].append(line["rows"])
        for step, runs in seen.items():
            by_step[step].append(runs)
    return by_step


def require_each_row_once(by_step):
    """In each epoch, of the last run of each step."""
    assert sorted(by_step) == list(range(1, STEPS + 1))
    steps_of_epoch = STEPS // EPOCHS
    for epoch in range(EPOCHS):
        steps = range(epoch * steps_of_epoch + 1, (epoch + 1) * steps_of_epoch + 1)
        taken = [row for step in steps for runs in by_step[step] for row in runs[-1]]
        assert sorted(taken) == list(range(ROWS))


def environment(**more):
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def run(*command, **more):
    return subprocess.run(
        list(map(str, command)),
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )


def test_torchrun_begins_all_again_from_the_checkpoint_where_a_rank_was_killed(tmp_path, capsys):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", 2, "--max-restarts", 2, EXAMPLE, *OPTIONS]
    command += ["--checkpoint", tmp_path / "job.pt", "--taken", tmp_path]
    command += ["--metrics", tmp_path / "metrics"]
    done = run(*command, "--die-rank", 1, "--die-at", 15, **ELASTIC)
    assert done.returncode == 0, done.stdout
    by_step = rows_by_step(tmp_path)
    require_each_row_once(by_step)
    # Only what was done since the checkpoint of step 12 was done again, with the same rows, which the ranks share anew.
    again = [step for step, ranks in by_step.items() if len(ranks[0]) == 2]
    assert again == [13, 14, 15]
    for step in again:
        first, second = ([row for runs in by_step[step] for row in runs[i]] for i in range(2))
        assert sorted(first) == sorted(second)
    assert main(["top", "--once", "--job", str(tmp_path / "metrics")]) == 0
    assert capsys.readouterr().out.count("ended") == 2


SRUN = """
import os, signal, subprocess, sys, time
tasks = int(os.environ["SLURM_NTASKS"])
command = [a for a in sys.argv[1:] if a != "--kill-on-bad-exit=0"]
running = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)})
    for i in range(tasks)
]
if not os.environ.get("SLURM_RESTART_COUNT"):  # two minutes before the first run's limit
    log = os.environ["FAKE_LOG"]
    while not os.path.exists(log) or sum(1 for _ in open(log)) < 5:
        time.sleep(0.01)
    for task in running:
        task.send_signal(signal.SIGUSR1)
codes = [task.wait() for task in running]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("127.0.0.1")
elif sys.argv[1] == "requeue":
    open(os.environ["FAKE_REQUEUED"], "a").write(sys.argv[2] + "\\n")
"""


@pytest.fixture
def slurm(tmp_path):
    """Runs the script as a batch script of two tasks; srun and scontrol are made up."""
    for name, source in {"srun": SRUN, "scontrol": SCONTROL}.items():
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def batch(*options, **more):
        more |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable}
        more |= {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "here"}
        more |= {"FAKE_LOG": str(tmp_path / "rows-0.jsonl"), "GLOO_SOCKET_IFNAME": "lo"}
        more |= {"FAKE_REQUEUED": str(tmp_path / "requeued"), "TRAIN": str(EXAMPLE)}
        return run("bash", SLURM, tmp_path / "job.pt", *OPTIONS, *options, **more)

    return batch


def test_slurms_script_queues_a_job_again_that_was_asked_to_stop(slurm, tmp_path):
    first = slurm("--taken", tmp_path, "--ms", 30)
    assert first.returncode == 138, first.stdout
    assert (tmp_path / "requeued").read_text() == "77\n"
    assert 5 <= len((tmp_path / "rows-0.jsonl").read_text().splitlines()) < STEPS
    second = slurm("--taken", tmp_path, SLURM_RESTART_COUNT="1")
    assert second.returncode == 0, second.stdout
    assert (tmp_path / "requeued").read_text() == "77\n"
    by_step = rows_by_step(tmp_path)
    assert all(len(runs) == 1 for ranks in by_step.values() for runs in ranks)  # nothing twice
    require_each_row_once(by_step)


@pytest.mark.parametrize(
    ("status", "restarts", "queued"),
    [(0, 0, 0), (143, 0, 0), (138, 9, 1), (137, 0, 1), (1, 2, 1), (1, 3, 0)],
)
def test_slurms_script_queues_again_by_the_exit_status(slurm, tmp_path, status, restarts, queued):
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {status}\n")
    done = slurm(SLURM_RESTART_COUNT=str(restarts))
    assert done.returncode == status
    assert (tmp_path / "requeued").exists() == bool(queued)
