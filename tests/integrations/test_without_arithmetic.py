"""Programs of trainers on a CUDA device without arithmetic (csrc/cuda_sim): they end, with plausible bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import brimful

ROOT = Path(__file__).resolve().parents[2]
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
    run = [ROOT / "csrc" / "cuda_sim" / "run.py", "--libraries", LIBRARIES]
    guarded = [*run, "--guard", tmp_path / "scratch", "--", sys.executable]
    chosen = {"SIM_CUDA_ARITHMETIC": "0", "SIM_CUDA_DEVICE": "h200", "SIM_CUDA_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, *guarded, PROGRAMS / f"{name}.py", folder],
        env={**os.environ, **chosen, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    said = done.stdout + done.stderr
    if "is refused outside of" in said:
        pytest.skip("this system redirects no files")
    assert done.returncode == 0, said
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["states"] <= found["allocated"] <= (1 + SLACK) * found["states"], said
    files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    assert files == {checkpoint: KEPT}
