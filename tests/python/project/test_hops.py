"""Few of brimful's own functions lie between a step and the program's function that it calls: a reader follows them.

The walks through the code (docs/design/0017-walks.md) have these numbers, and list what files a step of a sizer passes.
"""

import ctypes
import re
import shutil
import signal
import threading
from pathlib import Path

import native_stack
import pytest
import torch

import brimful

ROOT = Path(__file__).resolve().parents[3]
MOST = {"sizer": 9, "pipeline": 18}
MOST_FILES = 20

pytestmark = pytest.mark.skipif(
    shutil.which("nm") is None, reason="there is no nm, which names C++ functions"
)


class Linear(torch.nn.Linear):
    def __init__(self, called=lambda: None):
        super().__init__(4, 1)
        self.called = called

    def forward(self, batch):
        self.called()
        return super().forward(batch)


def frames_of_a_sizers_step():
    frames = []

    def loss_fn(model, piece):
        frames.append(native_stack.own_frames())
        return model(piece).mean()

    brimful.BatchSizer(model := Linear()).step(torch.ones(8, 4), loss_fn)
    assert model.weight.grad is not None and len(frames) == 1
    return frames[0]


def frames_of_a_pipelines_step():
    """The caller's, which waits, and then those of the thread that runs the stage."""
    caller, frames, taken = threading.get_ident(), [], threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def take(_):
        frames.extend(native_stack.own_frames())
        taken.set()

    def called():
        if not taken.is_set():
            signal.pthread_kill(caller, signal.SIGUSR2)
            assert taken.wait(10)
            frames.extend(native_stack.own_frames())

    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(
        signal.SIGUSR2, ctypes.cast(take, ctypes.c_void_p)
    )  # by C: Python's own waits for the step
    try:
        pipeline = brimful.Pipeline([Linear(called)], microbatches=1, loss_fn=lambda y, _: y.mean())
        pipeline.step(torch.ones(4, 4), torch.ones(4))
    finally:
        libc.signal(signal.SIGUSR2, before)
    return frames


@pytest.mark.parametrize(
    ("of", "frames_of"),
    [("sizer", frames_of_a_sizers_step), ("pipeline", frames_of_a_pipelines_step)],
)
def test_few_functions_lie_between_a_step_and_the_programs_function(of, frames_of):
    frames = frames_of()
    print(*frames, sep="\n")
    assert frames[0].endswith(".step") and len(frames) > 5
    assert len(frames) <= MOST[of], frames


def test_the_walk_lists_the_files_that_a_step_passes():
    page = (ROOT / "docs/design/0017-walks.md").read_text()
    table = page.partition("| files | what is there |\n")[2].partition("\n\n")[0]
    files = re.findall(r"`([\w/.]+)`", table)
    assert 5 < len(files) == len(set(files)) <= MOST_FILES
    code = "\n".join((ROOT / file).read_text() for file in files)
    passed = [re.split("[:.]", name)[-1] for name in frames_of_a_sizers_step()]
    assert [name for name in passed if not re.search(rf"\b{name}\(", code)] == []
