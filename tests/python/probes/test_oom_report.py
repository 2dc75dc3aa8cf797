"""Out-of-memory errors report what filled the memory, by themselves."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import brimful
from brimful import memory

sys.path.insert(0, str(Path(__file__).parents[2] / "ooms"))
import oom_loop

MIB = 1 << 20


@pytest.fixture
def limit():
    """Room for 8 MiB more."""
    memory.set_limit("cpu", memory.stats("cpu").used_bytes + 8 * MIB)
    yield
    memory.set_limit("cpu", None)


@pytest.mark.parametrize("program", oom_loop.PLANTED, ids=lambda path: path.stem)
def test_the_first_cause_is_the_planted_one(program):
    report = oom_loop.run(program)
    assert oom_loop.is_right(program, report), str(report)


def test_the_message_names_lines_in_a_few_lines(limit):
    with memory.track(), pytest.raises(torch.OutOfMemoryError) as error:
        held = torch.ones(MIB)
        torch.ones(2 * MIB)
    words = str(error.value).splitlines()
    assert words[0].startswith("CPU out of memory. Tried to allocate 8.0 MiB")
    assert len(words) <= 13
    assert any("4.0 MiB at" in line and "test_oom_report.py" in line for line in words)
    assert any("the largest request that fits: 4.0 MiB" in line for line in words)
    del held


def test_nothing_is_said_where_tracking_is_off(limit):
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.ones(4 * MIB)
    assert "\n" not in str(error.value)


def test_a_page_is_written_where_it_is_asked_for(limit, tmp_path):
    path = tmp_path / "oom.html"
    with memory.track(report=path), pytest.raises(torch.OutOfMemoryError):
        torch.ones(4 * MIB)
    page = path.read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.rstrip().endswith("</html>")
    assert "16.0 MiB were asked for" in page
    data = re.compile(r"<script type=.?application/json.*?</script>", re.DOTALL)
    asset = data.sub("", page)  # the data has this process's command line
    assert len(asset) < len(page)
    assert not re.findall(r"""(?:src|href)=|url\(|import |fetch\(""", asset)
    path.unlink()
    with memory.track(), pytest.raises(torch.OutOfMemoryError):
        torch.ones(4 * MIB)
    assert not path.exists()


def test_a_path_that_cannot_be_written_costs_one_warning():
    code = """
        import torch
        from brimful import memory
        memory.set_limit("cpu", memory.stats("cpu").used_bytes + (1 << 20))
        with memory.track():
            for _ in range(3):
                try:
                    torch.ones(1 << 20)
                except torch.OutOfMemoryError as error:
                    assert "In use" in str(error), error
        print("the job goes on")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "BRIMFUL_OOM_REPORT": "/nowhere/oom.html"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "the job goes on\n"
    assert done.stderr.count("/nowhere/oom.html") == 1


def test_a_retried_step_has_its_report_when_tracking_ends(tmp_path):
    path = tmp_path / "oom.html"
    model = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 1))
    sizer = brimful.BatchSizer(model)
    memory.set_limit("cpu", memory.stats("cpu").used_bytes + 8 * MIB)
    try:
        with memory.track(report=path):
            sizer.step(torch.randn(1024, 64), lambda model, rows: model(rows).square().mean())
            assert not path.exists()
    finally:
        memory.set_limit("cpu", None)
    assert sizer.report().retries > 0
    assert "Out of memory on cpu" in path.read_text()
    report = memory.last_oom()
    assert report.phase in ("forward", "backward")
    assert "test_oom_report.py" in report.place


def test_a_report_makes_no_tensor(limit):
    with memory.track():
        before = memory.tracking_counts("cpu").births
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(4 * MIB)
        assert memory.tracking_counts("cpu").births == before


def test_an_error_with_torchs_words_gets_a_note(limit):
    with pytest.raises(torch.OutOfMemoryError) as error, memory.track():
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(4 * MIB)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB.")
    (note,) = error.value.__notes__
    assert note.startswith("Asked for 16.0 MiB at") or "Likely cause" in note
    with pytest.raises(torch.OutOfMemoryError) as error, memory.track():
        torch.ones(4 * MIB)
    assert not hasattr(error.value, "__notes__")


@pytest.mark.gpu
def test_cuda_reports_what_split_its_segments():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with memory.track():
        held = torch.ones(MIB, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 44, device="cuda")
        report = memory.last_oom()
    assert report.device == "cuda:0"
    assert report.request_bytes >= 1 << 46
    assert report.largest_bytes < 1 << 46
    assert "lie outside the largest piece" in str(report)
    del held


BEFORE_CUDA = """
import torch
from brimful import memory
with memory.track():
    assert not torch.cuda.is_initialized()
    held = torch.ones(1 << 20, device="cuda")
    refused = False
    try:
        torch.empty(1 << 44, device="cuda")
    except torch.OutOfMemoryError:
        refused = True
    blocks = memory.live_blocks("cuda")
    print(refused, memory.last_oom().device, sum(block.bytes for block in blocks))
"""


@pytest.mark.gpu
def test_a_device_is_tracked_from_its_first_tensor_though_cuda_begins_later():
    """No tensor of the CPU is made meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_CUDA], stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert done.stdout.split() == ["True", "cuda:0", str(4 * MIB)]


@pytest.mark.gpu
def test_on_cuda_the_largest_request_is_within_the_limit():
    torch.zeros(1, device="cuda")
    memory.release_cached("cuda")
    memory.set_limit("cuda", memory.stats("cuda").reserved_bytes + 64 * MIB)
    try:
        with memory.track(), pytest.raises(torch.OutOfMemoryError):
            held = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
            torch.empty(48 * MIB, dtype=torch.uint8, device="cuda")
        report = memory.last_oom()
        assert report.limit_bytes == memory.stats("cuda").limit_bytes
        assert report.largest_bytes == 32 * MIB
        assert "the largest request that fits: 32.0 MiB, short by 16.0 MiB" in report.short
        torch.empty(report.largest_bytes, dtype=torch.uint8, device="cuda")
        del held
    finally:
        memory.set_limit("cuda", None)
