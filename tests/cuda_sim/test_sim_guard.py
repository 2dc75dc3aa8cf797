"""A guarded program changes no file of the machine, however it writes."""

import ctypes
import hashlib
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from simulation import RUN

LIBRARIES = Path(os.environ.get("LD_PRELOAD", "").split(":")[0]).parent
GUARD = LIBRARIES / "guard"
MODES = {"redirected": [], "in memory": ["--in-memory"], "refused": ["--refuse"]}
CANNOT = 125


def bare():
    """The variables of a program that needs no devices."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def started(tmp_path, source):
    """Starts Python source, whose output can be read."""
    return subprocess.Popen(
        [GUARD, "--scratch", tmp_path / "scratch", "--", sys.executable, "-c", source],
        env=bare(),
        stdout=subprocess.PIPE,
        text=True,
    )


def guarded(tmp_path, source, *options, command=None):
    """Runs Python source in the folder of the files: status, output, words of the guard."""
    files = tmp_path / "files"
    done = subprocess.run(
        [
            *(GUARD, "--scratch", tmp_path / "scratch", *options, "--"),
            *(command or [sys.executable, "-c", source]),
        ],
        cwd=files if files.exists() else tmp_path,
        env=bare(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def redirects(tmp_path_factory):
    """Whether this system lets a program have mounts of its own."""
    status, _, words = guarded(tmp_path_factory.mktemp("asked"), "pass")
    assert status in (0, CANNOT), words
    return status == 0 and "is refused outside of" not in words


@pytest.fixture(scope="module")
def refuses(tmp_path_factory):
    """Whether its kernel has Landlock."""
    status, _, words = guarded(tmp_path_factory.mktemp("asked"), "pass", "--refuse")
    assert status in (0, CANNOT), words
    return status == 0


def can(mode, redirects, refuses):
    return refuses or (redirects and mode != "refused")


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    (folder / "checkpoint-10").mkdir(parents=True)
    (folder / "checkpoint-20").mkdir()
    for name in ("checkpoint-10/model.pt", "checkpoint-20/model.pt", "log.txt"):
        (folder / name).write_bytes(name.encode() * 1000)
    os.link(folder / "log.txt", folder / "linked.txt")
    (folder / "latest").symlink_to("checkpoint-20/model.pt")
    return folder


def state(folder):
    """Every path with its mode, times and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        entry = path.lstat()
        content = b"" if path.is_dir() else path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        found[str(path)] = (entry.st_mode, entry.st_size, entry.st_mtime_ns, digest)
    return found


BEGIN = """
import mmap, os, shutil, sqlite3, subprocess, threading
from pathlib import Path
log, model = Path("log.txt"), Path("checkpoint-20/model.pt")
def write(path, text, how="w"):
    with open(path, how) as file:
        file.write(text)
"""
PROGRAMS = {
    "cuts": "write(log, 'new'); assert log.read_text() == 'new'",
    "cuts without a write": "open(log, 'w'); assert log.stat().st_size == 0",
    "truncates": "os.truncate(log, 3); assert log.stat().st_size == 3",
    "appends": "write(log, '!', 'a'); assert log.read_text()[-1] == '!'",
    "writes in place": "write(log, '!', 'r+'); assert log.read_text()[0] == '!'",
    "through a link": "write('latest', 'x'); assert model.read_text() == 'x'",
    "through another name": "write('linked.txt', 'x', 'a')",
    "by a map": """
with open(log, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[:1] = b"!"
    view.flush()
assert log.read_text()[0] == "!"
""",
    "renames": "log.rename('old'); assert not log.exists() and Path('old').exists()",
    "replaces": "write('new', 'x'); os.replace('new', log); assert log.read_text() == 'x'",
    "deletes": "log.unlink(); assert 'log.txt' not in os.listdir()",
    "deletes a folder": "shutil.rmtree('checkpoint-10'); assert 'checkpoint-10' not in os.listdir()",
    "keeps the last two": """
os.mkdir("checkpoint-30")
write("checkpoint-30/model.pt", "x")
shutil.rmtree("checkpoint-10")
assert sorted(str(p) for p in Path().glob("check*")) == ["checkpoint-20", "checkpoint-30"]
""",
    "a database": """
database = sqlite3.connect("runs.db")
database.execute("create table runs (name)")
database.commit()
assert Path("runs.db").exists()
""",
    "another program": """
subprocess.run("echo x > log.txt; rm -r checkpoint-10", shell=True, check=True)
assert log.read_text() == "x\\n"
""",
    "a thread": """
thread = threading.Thread(target=write, args=(log, "x"))
thread.start()
thread.join()
assert log.read_text() == "x"
""",
    "the home folder": """
note = Path.home() / "brimful-guard-test"
write(note, "x")
assert note.read_text() == "x"
""",
}
CASES = [(name, mode) for mode in ("redirected", "refused") for name in PROGRAMS]
CASES += [(name, "in memory") for name in ("cuts", "renames", "deletes a folder")]


@pytest.mark.parametrize("name, mode", CASES)
def test_every_byte_is_as_it_was(tmp_path, files, redirects, refuses, name, mode):
    before = state(files)
    status, out, words = guarded(tmp_path, BEGIN + PROGRAMS[name], *MODES[mode])
    assert state(files) == before
    assert not (Path.home() / "brimful-guard-test").exists()
    if redirects and mode != "refused":
        assert status == 0, out + words
        assert "the machine's files are as they were" in words
    elif not refuses:
        assert status == CANNOT
        assert "and the program was not run" in words
    else:
        assert "is refused outside of" in words
        assert status != 0 or name == "a thread", out + words


def test_modes_and_times_are_as_they_were(tmp_path, files, redirects):
    """Landlock leaves them to the program."""
    if not redirects:
        pytest.skip("this system gives a program no mounts of its own")
    before = state(files)
    source = "import os; os.chmod('log.txt', 0o600); os.utime('log.txt', (1, 1))"
    assert guarded(tmp_path, source)[0] == 0
    assert state(files) == before


def test_the_report_names_what_was_written_and_removed(tmp_path, files, redirects):
    if not redirects:
        pytest.skip("this system gives a program no mounts of its own")
    source = (
        "import os; open('a\\nb', 'w').write('12345'); os.remove('log.txt'); os.makedirs('d/e')"
    )
    report = tmp_path / "report"
    status, _, words = guarded(tmp_path, source, "--report", report)
    assert status == 0, words
    assert report.read_text().splitlines() == [
        f"written 5 {files}/a\\nb",
        f"removed {files}/log.txt",
    ]
    assert "(the program wrote: 1, bytes: 5, removed: 1)" in words


def test_what_a_program_makes_for_itself_is_there(tmp_path, redirects, refuses):
    source = """
import multiprocessing.shared_memory as shared, os, tempfile
with tempfile.NamedTemporaryFile() as made:
    made.write(b"x")
block = shared.SharedMemory(create=True, size=64)
block.unlink()
open(os.devnull, "w").write("x")
print(os.getuid(), os.getcwd())
"""
    for mode, options in MODES.items():
        if not can(mode, redirects, refuses):
            continue
        folder = tmp_path / mode.replace(" ", "-")
        folder.mkdir()
        status, out, words = guarded(folder, source, *options)
        assert status == 0, words
        assert out.split() == [str(os.getuid()), str(folder)]


@pytest.mark.parametrize("mode", ("redirected", "refused"))
def test_the_machines_network_is_out_of_reach_unless_allowed(tmp_path, redirects, refuses, mode):
    if not can(mode, redirects, refuses):
        pytest.skip("this system cannot guard a program so")
    options = MODES[mode]
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = (
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        )
        status, _, words = guarded(tmp_path, source, *options)
        assert status == 1 and ("refused" in words or "denied" in words), words
        (tmp_path / "again").mkdir()
        assert guarded(tmp_path / "again", source, *options, "--network")[0] == 0


def test_processes_of_the_program_meet(tmp_path, redirects):
    if not redirects:
        pytest.skip("this system gives a program no network of its own")
    source = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 5)
"""
    status, _, words = guarded(tmp_path, source)
    assert status == 0, words


def test_it_refuses_where_it_cannot_redirect(tmp_path, files, refuses):
    """Under Landlock nothing can be mounted: as on a system without mounts for users."""
    if not refuses:
        pytest.skip("this system has no Landlock")
    before = state(files)
    inner = [GUARD, "--scratch", tmp_path / "scratch" / "inner", "--"]
    program = [sys.executable, "-c", "open('log.txt', 'w')"]
    status, _, words = guarded(tmp_path, "", "--refuse", command=[*inner, *program])
    assert status == 1
    assert words.count("is refused outside of") == 2
    assert "PermissionError" in words
    assert state(files) == before


def deny(*calls):
    """In a child, before it starts a program: these calls of the system fail with EPERM from here on."""
    load, equal, give, allowed, refused = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001
    code = [struct.pack("HBBI", load, 0, 0, 0)]
    for number in calls:
        code.append(struct.pack("HBBI", equal, 0, 1, number))
        code.append(struct.pack("HBBI", give, 0, 0, refused))
    code.append(struct.pack("HBBI", give, 0, 0, allowed))
    program = ctypes.create_string_buffer(b"".join(code))
    whole = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    prctl = ctypes.CDLL(None).prctl
    assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, whole, 0, 0) == 0


UNSHARE, CREATE_RULESET = 272, 444


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls have other numbers")
def test_a_system_that_can_do_neither_does_not_run_the_program(tmp_path):
    done = subprocess.run(
        [GUARD, "--scratch", tmp_path / "scratch", "--", "sh", "-c", "echo run"],
        env={},
        preexec_fn=lambda: deny(UNSHARE, CREATE_RULESET),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (CANNOT, "")
    assert "can neither redirect what a program writes (namespaces of its own: " in done.stderr
    assert "run it in a container" in done.stderr
    assert "refused outside of" not in done.stderr


@pytest.mark.parametrize(
    "command, status",
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 128 + 9),
        (["/no/such/program"], 127),
        (["/etc/passwd"], 126),
    ],
)
@pytest.mark.parametrize("mode", ("redirected", "refused"))
def test_the_status_is_the_programs(tmp_path, redirects, refuses, mode, command, status):
    if not can(mode, redirects, refuses):
        status = CANNOT
    assert guarded(tmp_path, "", *MODES[mode], command=command)[0] == status


def test_signals_reach_the_program(tmp_path, redirects, refuses):
    if not can("redirected", redirects, refuses):
        pytest.skip("this system cannot guard a program")
    source = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
time.sleep(50)
"""
    with started(tmp_path, source) as running:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 5


def test_a_guard_that_is_killed_leaves_no_program(tmp_path, redirects, refuses):
    if not can("redirected", redirects, refuses):
        pytest.skip("this system cannot guard a program")
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(50)"
    with started(tmp_path, source) as running:
        program = int(running.stdout.readline())
        running.kill()
    for _ in range(100):
        status = Path(f"/proc/{program}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the program goes on without its guard")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "a program and a folder for what it writes are needed"),
        (["--scratch", "{scratch}"], "a program and a folder for what it writes are needed"),
        (["--", "true"], "a program and a folder for what it writes are needed"),
        (["--scratch"], "an option lacks its value (option: --scratch)"),
        (["--scratch", "{scratch}", "--on", "--", "true"], "an option is not known (option: --on)"),
        (
            ["--scratch", "/no/such/folder", "--", "true"],
            "cannot be made (folder: /no/such/folder)",
        ),
        (["--scratch", "/proc", "--", "true"], "the scratch folder"),
        (
            ["--scratch", "{scratch}", "--report", "/no/such/file", "--", "true"],
            "the report cannot be written",
        ),
    ],
)
def test_what_is_wrong_with_its_arguments_is_said(tmp_path, arguments, words):
    scratch = str(tmp_path / "scratch")
    done = subprocess.run(
        [GUARD, *(a.format(scratch=scratch) for a in arguments)],
        env={},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == CANNOT
    assert words in done.stderr


def test_a_folder_of_an_earlier_run_is_not_read_again(tmp_path, redirects, refuses):
    if not can("redirected", redirects, refuses):
        pytest.skip("this system cannot guard a program")
    assert guarded(tmp_path, "open('x', 'w')")[0] in (0, 1)
    status, _, words = guarded(tmp_path, "pass")
    assert status == CANNOT
    assert "the scratch folder is not empty" in words


def test_a_program_on_the_device_saves_a_checkpoint_that_is_not_the_machines(tmp_path, redirects):
    if not redirects:
        pytest.skip("this system gives a program no mounts of its own")
    source = """
import torch
torch.save(torch.ones(4, device="cuda"), "model.pt")
assert torch.load("model.pt").sum() == 4
"""
    (tmp_path / "model.pt").write_text("theirs")
    done = subprocess.run(
        [
            *(sys.executable, RUN, "--libraries", LIBRARIES),
            *("--guard", tmp_path / "scratch", "--", sys.executable, "-c", source),
        ],
        cwd=tmp_path,
        env=bare(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.pt").read_text() == "theirs"
