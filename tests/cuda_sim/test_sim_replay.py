"""Operators that take on the simulated device what a real one took beside their results."""

import sys
from pathlib import Path

import pytest
from simulation import program

ROOT = Path(__file__).resolve().parents[2]

TAKEN = """
import torch
before = torch.cuda.memory_allocated()
for rows in (16, 64, 128, 256, 1024):
    x = torch.ones(rows, 256, device="cuda")
    torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); start = torch.cuda.memory_allocated()
    y = x.sum(0)
    torch.cuda.synchronize()
    print(torch.cuda.max_memory_allocated() - start - 1024, end=" ")
    assert y.tolist() == [rows] * 256
x = torch.ones(64, 255, device="cuda")
torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); start = torch.cuda.memory_allocated()
y = x.sum(0)
torch.cuda.synchronize()
print(torch.cuda.max_memory_allocated() - start - y.untyped_storage().nbytes() // 512 * 512 - 512 * (255 * 4 % 512 > 0))
"""


def test_an_operator_takes_what_is_recorded_and_what_is_on_the_line_between_rows(tmp_path):
    """The line goes on before the first rows and after the last. Other shapes take nothing."""
    table = tmp_path / "table"
    table.write_text(
        "aten::sum.dim_IntList 64x256 65536\naten::sum.dim_IntList 256x256 262144\n"
        "aten::sum.dim_IntList 256x256 1024\n"
    )
    status, said = program(TAKEN, SIM_CUDA_REPLAY=str(table))
    assert status == 0, said
    assert said.split() == ["16384", "65536", "131072", "262144", "1048576", "0"]


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "there is no such file"),
        ("aten::mm 4x4\n", "a line is not an operator, shapes and bytes"),
        ("aten::mm 4x4 -1\n", "a line is not an operator, shapes and bytes"),
        ("aten::mm 4x4 1 1\n", "a line is not an operator, shapes and bytes"),
    ],
)
def test_a_file_that_is_none_ends_with_a_sentence(tmp_path, text, said):
    path = tmp_path / "table"
    if text is not None:
        path.write_text(text)
    status, words = program(
        "import torch; torch.zeros(1, device='cuda')", SIM_CUDA_REPLAY=str(path)
    )
    assert status == 2
    assert f"{said} (SIM_CUDA_REPLAY: {path}" in words


# A step of a recorded model, on the simulated device: its arithmetic is done, and its peak is the H200's.
STEP = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.device_model import child
import torch
(found,) = child.measure({model!r}, [{rows}], [], "")
print(found["peak_over_base"])
"""


@pytest.mark.parametrize("model, rows", [("MLP", 12000), ("embeddings", 8000), ("conv + BN", 1024)])
def test_a_recorded_model_s_peak_is_that_of_the_device_it_was_recorded_on(tmp_path, model, rows):
    sys.path.insert(0, str(ROOT))
    recorded = pytest.importorskip("benchmarks.device_model.recorded")
    from benchmarks.device_model import replay

    table = tmp_path / "table"
    table.write_text("\n".join(replay.lines()) + "\n")
    there = next(
        step["peak_over_base"]
        for file in recorded.FILES
        for step in recorded.read(file).get(model, ())
        if step["rows"] == rows
    )
    source = STEP.format(root=str(ROOT), model=model, rows=rows)
    peaks = {}
    for path in ("", str(table)):
        status, said = program(source, SIM_CUDA_REPLAY=path, SIM_CUDA_MEMORY_MB="2048")
        assert status == 0, said
        peaks[path] = int(said.splitlines()[-1])
    assert peaks[""] != there
    assert peaks[str(table)] == there  # to the byte
