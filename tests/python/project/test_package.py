"""The package: what it is called, where CMake finds it, what it says, and a few whole steps."""

import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import classes, cross_entropy, gradients_of, relative_difference, wrap

import brimful
from brimful import _build_info, _compat

ROOT = Path(__file__).resolve().parents[3]


def run_python(*arguments, **environment):
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.smoke
def test_the_version_is_the_projects_and_says_what_it_is_built_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cuda = f".cu{torch.version.cuda.split('.')[0]}" if torch.version.cuda else ""
    minor = ".".join(torch.__version__.split(".")[:2])
    local = f"torch{minor}{cuda}{'' if _build_info.cuda else '.cpu'}"
    assert brimful.__version__ == f"{project['version']}+{local}"
    header = Path(brimful.__file__).parent / "include" / "brimful" / "version.h"
    site = Path(brimful.__file__).parent.parent
    if site == Path(sysconfig.get_path("purelib")):  # installed by pip, not the build folder
        assert [path.name for path in site.glob("brimful-*.dist-info")] == [
            f"brimful-{brimful.__version__}.dist-info"
        ]
        assert f'define BRIMFUL_VERSION "{brimful.__version__}"\n' in header.read_text()


def test_everything_announced_is_there():
    assert all(hasattr(brimful, name) for name in brimful.__all__)


@pytest.mark.smoke
def test_the_program_prints_the_folder_for_cmake():
    done = run_python("-m", "brimful", "--cmake-dir")
    assert done.returncode == 0, done.stderr
    assert done.stdout == brimful.cmake_prefix_path + "\n"
    assert (Path(brimful.cmake_prefix_path) / "brimful" / "brimfulConfig.cmake").is_file()
    version = run_python("-m", "brimful", "--version")
    assert version.stdout == brimful.__version__ + "\n"


@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf, of binutils")
def test_no_library_may_be_bound_to_torchs_copy_of_libstdcpp():
    """torch exports functions of another libstdc++; those of the file system are the dangerous ones."""
    for file in (Path(brimful.__file__).parent / "lib" / "libbrimful.so", brimful._C.__file__):
        done = subprocess.run(
            ["readelf", "--wide", "--dynamic", "--dyn-syms", file],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout)
        torchs = [name for name in needed if name.startswith(("libtorch", "libc10"))]
        assert needed.index("libstdc++.so.6") < needed.index(torchs[0])
        assert re.findall(r"\S*St10filesystem\S*", done.stdout) == []


@pytest.mark.parametrize("installed", ["2.10.1", "2.16.0+cu130", "3.1.0a0+git"])
def test_another_torch_is_refused_by_both_versions_and_a_remedy(monkeypatch, installed):
    monkeypatch.setattr(torch, "__version__", installed)
    with pytest.raises(ImportError) as caught:
        _compat.check_torch()
    text = str(caught.value)
    assert f"built for torch {_build_info.torch_minor} and this is torch {installed}: " in text
    assert f"install torch {_build_info.torch_minor}, or build brimful again" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("built", "installed", "built_words", "installed_words"),
    [
        ("13", None, "for CUDA 13", "without CUDA"),
        ("13", "12.9", "for CUDA 13", "for CUDA 12"),
        ("", "13.2", "without CUDA", "for CUDA 13"),
    ],
)
def test_a_torch_for_another_cuda_is_refused(
    monkeypatch, built, installed, built_words, installed_words
):
    monkeypatch.setattr(_build_info, "torch_cuda", built)
    monkeypatch.setattr(torch.version, "cuda", installed)
    with pytest.raises(ImportError) as caught:
        _compat.check_torch()
    text = str(caught.value)
    assert f"built for torch {_build_info.torch_minor} {built_words} and this is torch " in text
    assert f"{torch.__version__} {installed_words}: " in text


def test_another_minor_of_the_same_cuda_will_do(monkeypatch):
    cuda = _build_info.torch_cuda
    monkeypatch.setattr(torch.version, "cuda", f"{cuda}.99" if cuda else None)
    _compat.check_torch()


@pytest.mark.parametrize("suffix", ["0", "7", "1+cu128"])
def test_any_patch_of_the_same_torch_will_do(monkeypatch, suffix):
    monkeypatch.setattr(torch, "__version__", f"{_build_info.torch_minor}.{suffix}")
    _compat.check_torch()


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def step_with_a_retry(module):
    def loss(model, piece):
        if len(piece[1]) > 4:
            raise torch.OutOfMemoryError("planted")
        return cross_entropy(model, piece)

    return brimful.BatchSizer(module).step(classes(8), loss)


def test_a_retry_is_one_line_of_logging(caplog):
    with caplog.at_level(logging.INFO, logger="brimful"):
        step_with_a_retry(net())
    assert [(line.name, line.levelname) for line in caplog.records] == [("brimful", "WARNING")]
    assert caplog.records[0].getMessage() == (
        "rank 0 ran out of memory in step 0: a batch of 8 is repeated in 2 pieces instead of 1"
    )


LOGGING = """
import brimful, torch
from test_package import net, step_with_a_retry
step_with_a_retry(net())
"""


@pytest.mark.parametrize(("level", "heard"), [("error", False), ("warning", True)])
def test_the_environment_sets_the_level_of_the_log(level, heard):
    done = run_python("-c", LOGGING, BRIMFUL_LOG=level)
    assert done.returncode == 0, done.stderr
    assert ("ran out of memory in step 0" in done.stderr) == heard, done.stderr


def test_an_unknown_level_of_the_log_is_named():
    done = run_python("-c", "import brimful", BRIMFUL_LOG="loud")
    assert done.returncode == 0
    assert re.search(r"BRIMFUL_LOG is none of debug, .*\(value: loud\)", done.stderr)


@pytest.mark.smoke
def test_a_single_process_steps_in_pieces_that_fit():
    module, whole = net(), net()
    outcome = step_with_a_retry(module)
    assert (outcome.retries, outcome.pieces, outcome.split, outcome.weight) == (1, 2, [4, 4], 8)
    loss = cross_entropy(whole, classes(8))
    loss.backward()
    assert abs(outcome.loss - loss.item()) < 1e-6
    assert relative_difference(gradients_of(module), gradients_of(whole)) < 1e-6
    assert [attempt.ran_out for attempt in outcome.attempts] == [[0], []]


@pytest.mark.smoke
def test_one_rank_trains_in_a_loop():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sizer = brimful.BatchSizer(model, optimizer)
        losses = []
        for batch in sizer.batches([classes(8)] * 5):
            losses.append(sizer.step(batch, cross_entropy).loss)
            optimizer.step()
            optimizer.zero_grad()
        cross_entropy(model, classes(8)).backward()  # a plain loop
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()
    assert losses == sorted(losses, reverse=True) and len(losses) == 5


@pytest.mark.smoke
def test_memory_is_counted_and_limited():
    before = brimful.memory.stats("cpu").used_bytes
    tensor = torch.empty(1000, dtype=torch.uint8)
    assert brimful.memory.stats("cpu").used_bytes == before + 1000
    brimful.memory.set_limit("cpu", before + 1000)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CPU out of memory"):
            torch.empty(1, dtype=torch.uint8)
    finally:
        brimful.memory.set_limit("cpu", None)
    del tensor
