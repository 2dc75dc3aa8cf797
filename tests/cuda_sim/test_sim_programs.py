"""Programs as people write and run them, on a device without arithmetic: they end, and their bytes are plausible."""

import os
import sys
from pathlib import Path

import pytest
from guarded import run_guarded
from simulation import program

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
LIBRARIES = Path(os.environ.get("LD_PRELOAD", "").split(":")[0]).parent
SLACK = 0.05  # small tensors are rounded to 512 bytes, and batches are alive
KEPT = b"trained for a week"

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Of the checkpoints that each writes, one that is there before.
PROGRAMS = {
    "language": ([sys.executable, PROGRAMS / "language.py"], "bfloat16", "ckpt.pt"),
    "images": ([sys.executable, PROGRAMS / "images.py"], "float16", "model_best.pth.tar"),
    "two ranks": ([*TORCHRUN, PROGRAMS / "ranks.py"], "", "ddp.pt"),
    "LibTorch": ([LIBRARIES / "sim_train"], "", "model.pt"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_keeps_what_it_has_to_keep_and_changes_nothing(name, tmp_path):
    """Bytes by hand: parameters, times what is kept for each of them."""
    command, dtype, checkpoint = PROGRAMS[name]
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / checkpoint).write_bytes(KEPT)
    said, found = run_guarded(LIBRARIES, folder, tmp_path / "scratch", *command, folder, dtype)
    states = 4 * found["copies"] * found["parameters"]
    most = 4 * (found["copies"] + found.get("spare", 0)) * found["parameters"]
    for allocated in (found["allocated"], *found.get("of_others", ())):
        assert states <= allocated <= (1 + SLACK) * most, said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {checkpoint: KEPT}
    assert "the machine's files are as they were" in said


ENDS = """
import os, sys, torch
sys.setswitchinterval(0.05)  # seconds that a thread waits for Python's lock before it asks for it
statuses = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        x = torch.ones(4, device="cuda", requires_grad=True)
        (x * x).sum().backward()
        sys.exit(3)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(statuses)
"""


def test_a_program_may_end_right_after_a_backward():
    """An autograd thread may still wait for Python's lock, which it does not get while Python goes away."""
    status, said = program(ENDS, SIM_CUDA_ARITHMETIC="0")
    assert (status, said) == (0, f"{[3] * 4}\n")
