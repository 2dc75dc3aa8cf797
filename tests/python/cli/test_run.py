"""`brimful run`: the program's own stdout and exit status, and on stderr what its memory did."""

import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rank_processes import _context, print_to

from brimful import memory

TRAIN = """
import sys
import torch

print("arguments", sys.argv[1:], __name__)
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.Adam(model.parameters())
history = []
for _ in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    history.append(loss)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def python(folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=100
    )


def brimful_command(folder, *arguments):
    return python(folder, "-m", "brimful", "run", *arguments)


def _forked_main(folder, arguments, environment, outputs):
    print_to(*outputs)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(sys.argv[0], run_name="__main__")


def forked_python(folder, *arguments):
    """What `python` would do with the arguments, in a fork of a process that has imported torch: it starts at once."""
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [Path(scratch, name) for name in ("stdout", "stderr")]
        process = _context.Process(
            target=_forked_main, args=(folder, arguments, dict(os.environ), outputs)
        )
        process.start()
        process.join(100)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, 100)
        texts = [output.read_text() for output in outputs]
    return subprocess.CompletedProcess(arguments, process.exitcode, *texts)


def brimful_run(folder, *arguments):
    return forked_python(folder, "-m", "brimful", "run", *arguments)


def test_a_program_prints_what_it_prints_alone_and_its_memory_is_reported(folder):
    alone = forked_python(folder, "train.py", "--epochs", "3")
    watched = brimful_command(folder, "train.py", "--epochs", "3")
    assert watched.stdout == alone.stdout == "arguments ['--epochs', '3'] __main__\n"
    assert watched.returncode == alone.returncode == 0
    assert "brimful: peak " in watched.stderr
    assert "parameters 260 B" in watched.stderr  # they live until the report
    assert re.search(r"memory grew: `history\[\d\]` \(\S*train.py:11 ", watched.stderr)


def test_a_module_runs_as_with_python_m(folder):
    watched = brimful_run(folder, "-m", "train", "x")
    assert watched.stdout == forked_python(folder, "-m", "train", "x").stdout
    assert watched.returncode == 0


def test_an_error_keeps_its_traceback_and_status_and_is_explained(folder):
    (folder / "fails.py").write_text(
        "import torch\n"
        "def look_up(table):\n"
        "    return table(torch.tensor([7]))\n"
        "print('begins')\n"
        "look_up(torch.nn.Embedding(5, 2))\n"
    )
    alone, watched = python(folder, "fails.py"), brimful_command(folder, "fails.py")
    assert (
        (watched.stdout, watched.returncode) == (alone.stdout, alone.returncode) == ("begins\n", 1)
    )
    assert "brimful/run.py" not in watched.stderr
    own = 6  # lines of the program's frames; behind them torch's differ where it calls hooks
    assert watched.stderr.splitlines()[:own] == alone.stderr.splitlines()[:own]
    assert "index" in watched.stderr.split("IndexError")[-1]


@pytest.mark.parametrize(
    "end, status", [("sys.exit(7)", 7), ("sys.exit()", 0), ("sys.exit('no')", 1)]
)
def test_the_exit_status_is_the_programs(folder, end, status):
    (folder / "ends.py").write_text(f"import sys\n{end}\n")
    assert (
        brimful_run(folder, "ends.py").returncode == python(folder, "ends.py").returncode == status
    )


BAD_INDEX = """
import torch
{before}
torch.nn.Embedding(5, 2)(torch.tensor([7]))
"""
CUDA_COMES_INTO_USE = "for call, _ in torch.cuda._queued_calls: call()"


@pytest.mark.parametrize(
    "before, options, is_kept",
    [
        ("", [], False),
        ("", ["--op-ring"], True),
        (CUDA_COMES_INTO_USE, [], True),
        (CUDA_COMES_INTO_USE, ["--no-op-ring"], False),
    ],
)
def test_operators_are_kept_where_cuda_is_in_use(folder, before, options, is_kept):
    (folder / "fails.py").write_text(BAD_INDEX.format(before=before))
    watched = brimful_run(folder, *options, "fails.py")
    assert ("aten::embedding got index 7, allowed are 0 to 4" in watched.stderr) == is_kept


def test_a_program_may_watch_itself(folder):
    (folder / "watches.py").write_text(
        "import torch, brimful\n"
        "kept = []\n"
        "with brimful.memory.track(), brimful.op_ring():\n"
        "    kept.append(torch.ones(100))\n"
        "    print(len(brimful.memory.live_blocks()))\n"
        "print(brimful.memory.tracking())\n"
    )
    watched = brimful_run(folder, "--op-ring", "watches.py")
    assert (watched.stdout, watched.returncode) == ("1\nFalse\n", 0)
    assert "brimful: peak " in watched.stderr


RANKS = """
import os, sys
import torch

rank = int(os.environ["RANK"])
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for _ in range(12):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    history.append(loss if rank == 1 else loss.item())
sys.exit(5 * rank)
"""


def test_each_rank_of_torchrun_reports_itself(folder):
    (folder / "ranks.py").write_text(RANKS)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python(folder, "-m", *torchrun, "-m", "brimful", "run", "ranks.py")
    assert done.returncode != 0
    assert re.search(r"exitcode *: 5 ", done.stderr)
    lines = done.stderr.splitlines()
    told = {rank: [x for x in lines if x.startswith(f"brimful (rank {rank}): ")] for rank in (0, 1)}
    for words in told.values():
        assert any(": peak " in line for line in words)
    assert not any("memory gr" in line for line in told[0])
    assert any("memory grows: `history[" in line for line in told[1])  # as it happened
    assert any("memory grew: `history[" in line for line in told[1])
    assert not any(line.startswith(("memory gr", "brimful: ")) for line in lines)


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(64, 4096)
        self.head = torch.nn.Linear(4096, 1)

    def forward(self, x):
        return self.head(self.encoder(x).tanh())

model = Net()
forward = {forward}
forward(torch.randn(32, 64)).sum().backward()
print([module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks])
"""


@pytest.mark.parametrize(
    "forward", ["model", "torch.compile(model, backend='eager', fullgraph=True)"]
)
def test_the_peak_is_reported_by_module_and_models_stay_as_they_are(folder, forward):
    (folder / "net.py").write_text(NET.format(forward=forward))
    watched = brimful_run(folder, "net.py")
    assert (watched.stdout, watched.returncode) == ("[]\n", 0), watched.stderr
    if forward == "model":
        assert re.search(r"^brimful:   1.0 MiB in module encoder$", watched.stderr, re.M)
        assert " in module Net" in watched.stderr  # tanh
    assert " in module " not in brimful_run(folder, "--no-modules", "net.py").stderr


FILLS = """
import torch, brimful
limit = brimful.memory.stats("cpu").used_bytes + (8 << 20)
brimful.memory.set_limit("cpu", limit)

def fill():
    kept = []
    while True:
        kept.append(torch.ones(1 << 18))

{call}
"""
CATCHES = """
try:
    fill()
except torch.OutOfMemoryError:
    pass
"""
MENDS = """
model = torch.nn.Linear(256, 1024)
sizer = brimful.BatchSizer(model)
outcome = sizer.step(torch.randn(2048, 256), lambda model, piece: model(piece).square().mean())
assert outcome.retries, outcome
"""


@pytest.mark.parametrize("call, status", [("fill()", 1), (CATCHES, 0)])
def test_a_page_is_written_where_memory_runs_out(folder, call, status):
    (folder / "fills.py").write_text(FILLS.format(call=call))
    watched = brimful_run(folder, "fills.py")
    assert watched.returncode == status
    (page,) = folder.glob("oom-*.html")
    assert re.fullmatch(r"oom-\d+\.html", page.name)
    assert f"brimful: what filled the memory where it ran out: {page}\n" in watched.stderr
    assert "fills.py:9 (fill)" in page.read_text()
    if status:
        assert re.search(r"Asked for 1\.0 MiB at \S*fills\.py:9", watched.stderr)
        assert watched.stderr.index("Asked for") < watched.stderr.index("brimful: peak ")


def test_where_the_page_of_an_error_goes_can_be_said(folder, monkeypatch):
    (folder / "fills.py").write_text(FILLS.format(call="fill()"))
    (folder / "pages").mkdir()
    watched = brimful_run(folder, "--no-oom-page", "fills.py")
    assert watched.returncode == 1 and "ran out: " not in watched.stderr
    assert not list(folder.rglob("*.html"))
    monkeypatch.setenv("RANK", "3")
    brimful_run(folder, "--oom-page", "pages", "fills.py")
    assert [page.parent.name for page in folder.rglob("oom-rank3-*.html")] == ["pages"]
    monkeypatch.setenv("BRIMFUL_OOM_REPORT", "mine.html")
    brimful_run(folder, "fills.py")
    assert (folder / "mine.html").exists()
    assert len(list(folder.rglob("*.html"))) == 2
    lost = brimful_run(folder, "--oom-page", "nowhere", "fills.py")
    assert lost.returncode == 1 and "cannot be written" in lost.stderr


def test_an_error_that_a_sizer_repaired_leaves_no_page(folder):
    (folder / "mends.py").write_text(FILLS.format(call=MENDS))
    watched = brimful_run(folder, "mends.py")
    assert watched.returncode == 0, watched.stderr
    assert not list(folder.glob("*.html"))


def test_what_memory_did_is_recorded_where_it_is_asked_for(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    watched = brimful_run(folder, "--record", "run.brimful", "train.py")
    path = folder / "run.rank1.brimful"
    assert f"memory over time: brimful report {path}\n" in watched.stderr
    (cpu,) = memory.load_recording(path).devices
    assert cpu.steps == 12
    assert any("train.py:11 " in line for line, *_ in cpu.peak_by_line)
    assert cpu.peak_by_category["parameters"] == 260
    assert forked_python(folder, "-m", "brimful", "report", str(path)).returncode == 0


def test_a_program_that_records_by_itself_takes_over(folder):
    (folder / "records.py").write_text(
        "import torch\n"
        "from brimful import memory\n"
        "first = torch.ones(100)\n"
        "model = torch.nn.Linear(4, 4)\n"
        "with memory.record('own.brimful', modules=model):\n"
        "    model(torch.ones(1, 4))\n"
    )
    watched = brimful_run(folder, "--record", "run.brimful", "records.py")
    assert watched.returncode == 0, watched.stderr
    for name in ("own", "run"):
        (cpu,) = memory.load_recording(folder / f"{name}.brimful").devices
        assert cpu.events > 0
    assert brimful_run(folder, "records.py").returncode == 0


def test_a_recording_is_named_as_a_shell_takes_it(folder):
    watched = brimful_run(folder, "--record", "my run.brimful", "train.py")
    assert f"brimful report '{folder / 'my run.brimful'}'" in watched.stderr


def test_a_program_may_end_the_recording(folder):
    (folder / "ends.py").write_text(
        "import torch\nfrom brimful import memory\ntorch.ones(9)\nmemory.stop_recording()\n"
    )
    watched = brimful_run(folder, "--record", "run.brimful", "ends.py")
    assert watched.returncode == 0, watched.stderr
    assert "memory over time" not in watched.stderr


def test_a_program_that_is_not_there(folder):
    missing = brimful_run(folder, "nothing.py")
    alone = python(folder, "nothing.py")
    assert missing.returncode == alone.returncode == 2
    path = folder / "nothing.py"
    said = f"brimful run: the program cannot be read (path: {path}): No such file or directory\n"
    assert missing.stderr == said
    missing = brimful_run(folder, "-m", "nothing_of_this_name")
    assert missing.returncode == 2
    assert missing.stderr == "brimful run: there is no such module (name: nothing_of_this_name)\n"


def test_a_syntax_error_and_a_failing_package_are_shown_as_python_shows_them(folder):
    (folder / "wrong.py").write_text("a = 1\nif a\n")
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise KeyError('planted')\n")
    (package / "__main__.py").write_text("")
    alone, watched = python(folder, "wrong.py"), brimful_run(folder, "wrong.py")
    assert (watched.stderr, watched.returncode) == (alone.stderr, 1)
    watched = brimful_run(folder, "-m", "package")
    assert watched.returncode == 1
    assert "KeyError: 'planted'" in watched.stderr
    assert "brimful/run.py" not in watched.stderr and "importlib" not in watched.stderr


NAMES = """
import inspect, sys
print(__file__, sys.argv, __spec__, type(__loader__).__name__, sys.path[0])
def own(): pass
print(inspect.getsource(own))
"""


def test_names_of_the_program_are_those_of_python(folder):
    (folder / "in").mkdir()
    (folder / "in" / "names.py").write_text(NAMES)
    (folder / "in" / "__main__.py").write_text(NAMES)
    for program in ("in/names.py", "in"):
        alone, watched = python(folder, program), brimful_run(folder, program)
        if program == "in":  # which Python names after the folder
            assert f"{folder}/in/__main__.py" in watched.stdout
        else:
            assert watched.stdout == alone.stdout
        assert watched.returncode == 0, watched.stderr


def test_an_interrupt_shows_the_programs_frames_alone(folder):
    (folder / "ends.py").write_text("def f():\n    raise KeyboardInterrupt\nf()\n")
    alone, watched = python(folder, "ends.py"), brimful_command(folder, "ends.py")
    assert watched.returncode == alone.returncode
    assert "in f" in watched.stderr and "KeyboardInterrupt" in watched.stderr


HOSTILE = """
import sys, torch

class Odd(RuntimeError):
    def __str__(self): raise SystemExit(9)
    def with_traceback(self, _): raise SystemExit(9)

class Net(torch.nn.Linear):
    def named_modules(self, *_, **__): raise SystemExit(9)
    parameters = buffers = named_modules

net = Net(3, 3)
net(torch.ones(1, 3)).sum().backward()
if sys.argv[1] == "stderr":
    sys.stderr = None
elif sys.argv[1] == "error":
    raise Odd
print("ends")
"""


@pytest.mark.parametrize("end, status", [("well", 0), ("stderr", 0), ("error", 1)])
def test_a_hostile_program_ends_as_it_does_alone(folder, end, status):
    (folder / "odd.py").write_text(HOSTILE)
    watched = brimful_run(folder, "odd.py", end)
    assert (watched.returncode, watched.stdout) == (status, "ends\n" if not status else "")
    assert ("peak " in watched.stderr) == (end != "stderr")


def test_a_line_is_reported_with_all_that_it_holds(folder):
    (folder / "lines.py").write_text(
        "import torch\n"
        "class Block(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.tanh()\n"
        "net = torch.nn.Sequential(*[Block() for _ in range(8)])\n"
        "net(torch.randn(1 << 18, requires_grad=True)).sum().backward()\n"
    )
    told = brimful_run(folder, "lines.py").stderr
    lines = re.findall(r"^brimful:   (\S+ MiB) of (.+): .*lines.py:4 ", told, re.M)
    assert lines == [("9.0 MiB", "activations, temporaries")], told
