"""Programs of trainers on a CUDA device without arithmetic (csrc/cuda_sim): they end, with plausible bytes."""

import sys
from pathlib import Path

import pytest

import brimful

sys.path.append(str(Path(__file__).resolve().parents[1] / "cuda_sim"))
from guarded import run_guarded

PROGRAMS = Path(__file__).resolve().parent / "programs"
LIBRARIES = Path(brimful._C.__file__).with_name("cuda_sim")
SLACK = 0.05  # small tensors are rounded to 512 bytes, and batches are alive
KEPT = b"trained for a week"

# What each imports, and one of the files that it writes, which is there before.
CASES = {
    "lora": (["transformers", "peft"], "checkpoint-6/adapter_model.safetensors"),
    "sft": (["trl", "datasets"], "checkpoint-3/model.safetensors"),
    "light": (["lightning"], "last.ckpt"),
    "generate": (["transformers"], "model.pt"),
}

pytestmark = pytest.mark.skipif(
    not (LIBRARIES / "libcudnn.so.9").exists(), reason="the simulated device is not built"
)


@pytest.mark.parametrize("name", CASES)
def test_a_program_ends_and_changes_no_checkpoint(name, tmp_path):
    """Bytes by hand: what trainers keep for each parameter."""
    modules, checkpoint = CASES[name]
    for module in modules:
        pytest.importorskip(module)
    folder = tmp_path / "runs"
    (folder / checkpoint).parent.mkdir(parents=True)
    (folder / checkpoint).write_bytes(KEPT)
    said, found = run_guarded(
        LIBRARIES,
        tmp_path,
        tmp_path / "scratch",
        *(sys.executable, PROGRAMS / f"{name}.py", folder),
        SIM_CUDA_DEVICES="1",
        PYTHONPATH=str(Path(__file__).parent),
    )
    assert found["states"] <= found["allocated"] <= (1 + SLACK) * found["states"], said
    files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    assert files == {checkpoint: KEPT}
