"""The two commands of a user, `make test` and `make demo`, and `.ci/run`, which calls them."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*command, **environment):
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


def test_ci_calls_make_test_and_prints_what_each_part_took(tmp_path):
    called = tmp_path / "called"
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$*" >>{called}\n')
    make.chmod(0o755)
    done = run(".ci/run", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout
    parts = ["setup-browser", "build", "lint", "test", "test-oldest", "test-slow"]
    environments = "setup-oldest setup-integrations"  # beside the build
    calls = called.read_text().split("\n")[:-1]
    assert [call for call in calls if call != environments] == parts
    assert calls.index(environments) in (1, 2)
    assert re.findall(r"^ci: make (\S+) took \d+ min \d+ s$", done.stdout, re.M) == parts


def test_make_test_prints_what_each_of_its_parts_took():
    done = run("make", "--dry-run", "test")
    assert done.returncode == 0, done.stdout
    timed = re.findall(r'^tools/timed\.sh "make (test-\S+)"', done.stdout, re.M)
    assert timed == ["test-cpp", "test-consumer", "test-layers", "test-python", "test-cuda-sim"]


@pytest.mark.parametrize("status", [0, 3])
def test_a_part_ends_as_its_command_ended(status):
    done = run("tools/timed.sh", "make part", "WORD=said", "sh", "-c", f"echo $WORD; exit {status}")
    assert done.returncode == status
    assert re.fullmatch(r"said\nmake part took 0 min \d s\n", done.stdout)


def test_help_lists_the_two_commands_of_a_user():
    assert {"test", "demo"} <= set(re.findall(r"^  make (\S+)", run("make", "help").stdout, re.M))
