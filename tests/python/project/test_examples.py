"""The examples, each run as a user runs it, on a part of the data."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import brimful

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
MIB = 1 << 20
SMALL = ["--samples", "6000", "--epochs", "2"]  # 7 steps an epoch on rank 0, 6 on rank 1

sys.path.insert(0, str(EXAMPLES))
import fashion_mnist  # noqa: E402


def torchrun(*arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    return run(*command, *arguments)


def run(*command):
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What the demo printed, its result, and its parameters before and after."""
    folder = tmp_path_factory.mktemp("demo")
    files = [folder / name for name in ("result.json", "initial.pt", "final.pt")]
    options = zip(("--json", "--save-initial", "--save-final"), files, strict=True)
    printed = torchrun(EXAMPLES / "train_fashion_mnist.py", *SMALL, *sum(options, ()))
    return printed, json.loads(files[0].read_text()), *files[1:]


@pytest.fixture(scope="session")
def cpp_app():
    build = ROOT / "build" / f"cpp_app-torch-{torch.__version__.split('+')[0]}"
    bin_ = Path(sys.executable).parent
    launcher = shutil.which("ccache")
    configure = [bin_ / "cmake", "-S", EXAMPLES / "cpp_app", "-B", build, "-G", "Ninja"]
    configure += [f"-DCMAKE_PREFIX_PATH={brimful.cmake_prefix_path}", "-DCMAKE_CXX_FLAGS=-O0"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={bin_ / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-UBRIMFUL_TORCH_*"]
    configure += [f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"] if launcher else []
    for command in (configure, [bin_ / "cmake", "--build", build]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
    return build / "cpp_app"


def test_demo_goes_on_after_a_shortage_inside_backward(demo):
    printed, result, _, _ = demo
    first, second = result["ranks"]
    assert result["difference"] == 0
    assert second["buckets_launched"] >= 1
    assert first["retries_agreed"] == second["retries_agreed"] >= 1
    assert second["ran_out"] > second["retries_alone"] >= 1  # alone at the start, then by the cut
    assert first["budgets"] == [32 * MIB]
    assert second["budgets"] == [32 * MIB, 16 * MIB]
    for seen in (first, second):
        assert seen["steps"] == 14
        assert all(
            peak <= budget for peak, budget in zip(seen["peaks"], seen["budgets"], strict=True)
        )
    assert (first["no_data"], second["no_data"]) == (0, 2)
    assert "rank 1 loses memory inside backward" in printed
    assert "largest difference of parameters" in printed


def without_figures(text):
    return [
        re.sub(r"[\d.]+", "#", " ".join(line.split())) for line in text.splitlines() if line.strip()
    ]


def test_the_readme_shows_what_the_demo_prints(demo):
    """Line by line and in order; figures vary."""
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"^`make demo`.*?^```\n(.*?)^```", readme, re.M | re.S)[1]
    printed = iter(without_figures(demo[0]))
    for line in without_figures(shown):
        assert line in printed, f"not printed, or not behind the line before: {line}"


@pytest.mark.timeout(600)  # compiles torch/torch.h
def test_cpp_app_ends_with_the_parameters_of_the_python_program(demo, cpp_app, tmp_path):
    _, result, initial, final = demo
    of_cpp = tmp_path / "final.pt"
    printed = torchrun("--no-python", cpp_app, *SMALL, "--initial", initial, "--save-final", of_cpp)
    ours, theirs = dict(torch.load(final)), dict(torch.load(of_cpp))
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        # Not to the bit: how a batch is split follows from the bytes in use, which are each program's own.
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-5, msg=name)
    # Its inference classifies the same images right, in more pieces than one.
    assert "ran out of memory in map_batches: a batch of 1000 is repeated in" in printed
    pieces = re.search(r"inference: batches of 1000 images in (\d+) pieces", printed)
    assert int(pieces[1]) > 1
    right = re.search(r"test accuracy: ([\d.]+) %", printed)
    assert float(right[1]) == pytest.approx(100 * result["accuracy"], abs=0.051)


@pytest.mark.timeout(600)
def test_first_steps_in_cpp_train_save_and_infer(cpp_app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = torchrun("--no-python", cpp_app.with_name("first_steps"))
    right = re.findall(r"^rank [01]: (\d+) % right$", printed, re.MULTILINE)
    assert len(right) == 2 and all(int(share) > 30 for share in right), printed  # by chance 10
    assert (tmp_path / "model.pt").is_file()


@pytest.mark.timeout(600)
def test_a_cpp_program_learns_where_its_memory_goes(cpp_app, tmp_path):
    samples = tmp_path / "samples.jsonl"
    printed = run(cpp_app.with_name("memory_report"), samples)
    total = int(re.search(r"peak: (\d+) bytes", printed)[1])
    parts = dict(re.findall(r"^  ([a-z_]+): (\d+)$", printed, re.MULTILINE))
    assert sum(map(int, parts.values())) == total
    weights = 4 * (256 * 512 + 512 + 512 * 10 + 10)
    assert int(parts["parameters"]) == weights
    assert int(parts["optimizer_state"]) >= 2 * weights
    leaks = re.findall(r"^leak: (.*)$", printed, re.MULTILINE)
    assert len(leaks) == 1 and "forward" in leaks[0] and "2.5 KiB a step" in leaks[0]
    assert "Asked for 2.0 MiB at a batch that is too large (other, step 18)" in printed
    assert re.search(r"^GPUs: \d+ ", printed, re.MULTILINE)
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) >= 2 and all(line["processes"][0]["pid"] > 0 for line in lines)


@pytest.mark.timeout(600)
def test_a_cpp_program_trains_a_model_in_two_stages(cpp_app):
    printed = run(cpp_app.with_name("pipeline"))
    losses = [
        float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), 8", printed, re.MULTILINE)
    ]
    assert len(losses) == 2 and losses[1] < losses[0] / 2, printed
    assert "Pipeline of 2 stages on 2 ranks (last step: zb_h1, 8 microbatches)" in printed
    assert "stage 1 (part 1): " in printed
    assert int(re.search(r"^(\d+) % right$", printed, re.MULTILINE)[1]) > 50  # by chance 10


def test_a_model_by_hand_and_its_pipeline_have_the_same_gradients():
    sizes = {"--batch": 8, "--image": 8, "--width": 8, "--steps": 2, "--rounds": 1}
    options = [str(word) for pair in sizes.items() for word in pair]
    printed = run(
        sys.executable, EXAMPLES / "model_parallel.py", *options, "--microbatches", 1, 2, 3
    )
    difference = re.search(r"largest difference of gradients: (\S+) of the largest", printed)
    assert float(difference[1]) < 1e-5
    assert "the gradients of the two ways differ" not in printed
    losses = re.findall(r"^ +\d   +([\d.]+)   +([\d.]+)$", printed, re.MULTILINE)
    assert len(losses) == 2
    for by_hand, pipelined in losses:
        assert float(by_hand) == pytest.approx(float(pipelined), rel=1e-4)
    row = r"^ +{}   +{}   +[\d.]+   +[\d.]+   +[\d.]+   +{}$"
    assert re.search(r"^ +by hand   +8   +[\d.]+   +[\d.]+   +1\.00$", printed, re.MULTILINE)
    for count, images, ideal in ((1, 8, "1.00"), (2, 4, "1.33"), (3, 3, "1.50")):
        assert re.search(row.format(count, images, ideal), printed, re.MULTILINE), printed


def test_shares_are_uneven_and_cover_the_data():
    parts = [fashion_mnist.share(60000, rank, 2) for rank in range(2)]
    assert parts == [slice(0, 32000), slice(32000, 60000)]


def test_missing_data_names_the_package():
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        fashion_mnist.load("train", "/nowhere")


def test_a_sharded_model_trains_with_half_the_memory_on_one_rank():
    printed = torchrun(EXAMPLES / "train_sharded.py", "--steps", "4", "--length", "16")
    assert "rank 1 ran out of memory in step 1" in printed
    assert re.search(r"step 1: loss [\d.]+, pieces [2-9]", printed)
    peak, limit = map(
        float, re.search(r"rank 1: peak ([\d.]+) MiB, limit ([\d.]+) MiB", printed).groups()
    )
    assert peak <= limit
    assert "rank 0: peak" in printed
