"""Files that brimful writes are whole or as they were, and nothing but a regular file is written to or replaced."""

import os
import stat
import subprocess
import sys
import threading

import pytest
import torch

import brimful
from brimful import memory


def recording():
    with memory.track():
        memory.start_recording()
        torch.ones(100)
        return memory.stop_recording()


def oom_page(path):
    with memory.track(report=path):
        memory.set_limit("cpu", memory.stats("cpu").used_bytes + 100)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1 << 20)
        finally:
            memory.set_limit("cpu", None)


def monitored(**place):
    with brimful.monitor.Monitor(interval_ms=1, **place) as watch:
        while watch.samples < 2:
            pass


WRITERS = {
    "save_on_rank0": lambda path: brimful.save_on_rank0({"a": 1}, path),
    "recording": lambda path: recording().save(str(path)),
    "record": lambda path: memory_record(path),
    "page": lambda path: brimful._C._write_memory_report([recording()], str(path)),
    "difference": lambda path: brimful._C._write_memory_difference(
        recording(), recording(), str(path)
    ),
    "trace": lambda path: brimful._C._write_memory_trace([recording()], str(path)),
    "snapshot": lambda path: brimful._C._write_memory_viz([recording()], str(path)),
    "timeline": lambda path: brimful._C._write_file(os.fsencode(path), "text"),
    "prometheus": lambda path: monitored(prometheus=path),
    "json": lambda path: monitored(json=path),
    "oom": oom_page,
}
QUIET = ("prometheus", "json", "oom", "record")  # which warn, and training goes on
writers = pytest.mark.parametrize("writer", WRITERS)


def memory_record(path):
    with memory.record(path):
        torch.ones(100)


def refusal_of(writer, path, caplog):
    if writer in QUIET:
        WRITERS[writer](path)
        return caplog.text
    with pytest.raises(OSError) as caught:
        WRITERS[writer](path)
    return str(caught.value)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))


@writers
@pytest.mark.parametrize("kind", ["FIFO", "symbolic link", "dangling symbolic link", "socket"])
def test_what_is_no_regular_file_is_refused_and_stays(writer, kind, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, target = tmp_path / "place", tmp_path / "target"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path.symlink_to(target)
    if kind == "symbolic link":
        target.write_text("kept")
    before = os.lstat(path)
    said = refusal_of(writer, path, caplog)
    if said or writer != "oom":  # whose warning comes once in a process
        words = f"only a regular file is written to, and this is a {kind.removeprefix('dangling ')}"
        assert words in said
        assert f"(path: {path}" in said and "name a file" in said
    assert (os.lstat(path).st_ino, os.lstat(path).st_mode) == (before.st_ino, before.st_mode)
    assert target.exists() == (kind == "symbolic link")
    if target.exists():
        assert target.read_text() == "kept"
    assert not list(tmp_path.glob("*.partial"))


@writers
def test_a_planted_partial_file_is_not_written_through(writer, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in ("place.partial", ".place.partial", "place.tmp"):
        (tmp_path / name).symlink_to(victim)
    WRITERS[writer](tmp_path / "place")
    assert victim.read_text() == "kept"
    assert (tmp_path / "place").stat().st_size > 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"place", "victim", "temporary", "place.partial", ".place.partial", "place.tmp"}


@writers
def test_who_may_read_a_file_stays(writer, tmp_path):
    path = tmp_path / "place"
    path.touch(0o600)
    WRITERS[writer](path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size > 0


def test_a_device_a_folder_and_a_name_with_a_zero_byte_are_refused(tmp_path):
    for path, words in [
        ("/dev/null", "this is a device"),
        (tmp_path, "this is a folder"),
        (f"{tmp_path}/", "names a folder"),
        (f"{tmp_path}/a\0b", "zero bytes"),
        (f"{tmp_path}/{'x' * 300}", "File name too long"),
    ]:
        with pytest.raises(OSError, match=words):
            brimful.save_on_rank0({}, path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    brimful.save_on_rank0(
        {"a": 1}, f"{tmp_path}/{'ä' * 127}"
    )  # and the name beside it is cut to fit
    assert len(list(tmp_path.iterdir())) == 2


def test_readers_see_the_old_file_or_the_new_one(tmp_path):
    path = os.fsencode(tmp_path / "text")
    texts = {"a" * 300_000, "b" * 400_000}
    brimful._C._write_file(path, min(texts))
    done = threading.Event()

    def write():
        for _ in range(50):
            for text in texts:
                brimful._C._write_file(path, text)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert (tmp_path / "text").read_text() in texts
    writer.join()


def test_a_link_to_a_folder_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    brimful.save_on_rank0({"a": 1}, tmp_path / "link" / "state.pt")
    assert torch.load(tmp_path / "real" / "state.pt") == {"a": 1}
    code = "import brimful; brimful.save_on_rank0({}, 'here.pt')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=100)
    assert (tmp_path / "here.pt").exists()
