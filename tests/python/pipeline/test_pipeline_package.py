"""Packages of AOTInductor as stages for inference, in Python and in C++."""

import os
import pathlib
import subprocess

import pytest
import torch
from torch import nn

import brimful
from brimful import Pipeline

pytestmark = pytest.mark.usefixtures("no_limit")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh()).eval()


@pytest.fixture(scope="module")
def package(model, tmp_path_factory):
    """Takes half a minute: it is compiled."""
    rows = torch.export.Dim("rows", min=1, max=64)
    exported = torch.export.export(model, (torch.randn(4, 6),), dynamic_shapes=({0: rows},))
    path = tmp_path_factory.mktemp("package") / "stage.pt2"
    return torch._inductor.aoti_compile_and_package(exported, package_path=str(path))


def test_a_loaded_package_is_a_stage(model, package):
    last = nn.Linear(6, 6)
    pipe = Pipeline([torch._inductor.aoti_load_package(package), last], microbatches=4)
    x = torch.randn(11, 6)
    with torch.no_grad():
        torch.testing.assert_close(pipe.forward(x), last(model(x)))


def test_so_is_one_that_a_cpp_program_loads(package):
    program = pathlib.Path(brimful.__file__).parents[2] / "tests" / "cpp" / "brimful_tests"
    if not program.exists():
        pytest.skip(f"the C++ tests are not built ({program})")
    done = subprocess.run(
        [program, "[package]"],
        env={**os.environ, "BRIMFUL_TEST_PACKAGE": package},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
