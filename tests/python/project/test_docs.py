"""What the documentation says: its code runs, its C++ is part of programs that are tested, its links lead somewhere."""

import contextlib
import ctypes
import gc
import io
import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import doc_names
import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

import brimful
from brimful import memory
from brimful.__main__ import _COMMANDS

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTED_ELSEWHERE = {"docs/integrations.md"}  # needs other packages: tests/integrations
LINKING = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("*/*/README.md")]
FENCE = re.compile(
    r"(?:^<!-- (?P<how>.*?) -->\n)?^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"\[[^\]\[]+\]\((?!https?:)([^)\s#]*)#?([^)\s]*)\)")
MOST_NOT_RUN = 3


@dataclass
class Block:
    page: str
    line: int  # of its first line of code
    language: str
    code: str
    how: str  # of the comment above it

    def __str__(self):
        return f"{self.page}:{self.line}"

    def run(self, namespace):
        """Errors have the page's own lines."""
        code = compile("\n" * (self.line - 1) + self.code, str(ROOT / self.page), "exec")
        exec(code, namespace)


def blocks_of(page):
    text = page.read_text()
    return [
        Block(
            page.relative_to(ROOT).as_posix(),
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            found["how"] or "",
        )
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [b for b in BLOCKS if b.language == "python" and b.page not in TESTED_ELSEWHERE]


def in_this_process(block):
    return not block.how.startswith(("not run:", "ranks:", "torchrun:", "simulated device"))


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """One rank, a folder of its own, and nothing left on behind it."""
    monkeypatch.chdir(tmp_path)
    gc.collect()  # what other tests have left counts against a page's limits
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    memory.stop_tracking()
    memory.set_limit("cpu", None)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON if in_this_process(block)}))
def test_code_in_python_runs(page, alone):
    """Blocks of a page run in order, with names that only their reader's program has from doc_names.py."""
    namespace = doc_names.of(page)
    for block in PYTHON:
        if block.page == page and in_this_process(block):
            block.run(namespace)


def run_on_rank(rank, block, folder):
    os.chdir(folder)
    block.run(doc_names.of(block.page, rank.index))


@pytest.mark.parametrize("block", [b for b in PYTHON if b.how.startswith("ranks:")], ids=str)
def test_code_of_several_ranks_runs(block, tmp_path):
    run_ranks(run_on_rank, block, tmp_path, size=int(block.how.split(":")[1]))


def run_program(rank, block, port):
    """As torchrun runs it; what it prints."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank.index), "WORLD_SIZE": str(rank.size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        block.run({"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("block", [b for b in PYTHON if b.how.startswith("torchrun:")], ids=str)
def test_programs_of_several_ranks_print_what_is_shown(block):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    printed = "".join(run_ranks(run_program, block, store.port, size=int(block.how.split(":")[1])))
    (shown,) = [b.code for b in blocks_of(ROOT / block.page) if b.code.startswith("$ torchrun")]
    assert sorted(printed.splitlines()) == sorted(shown.splitlines()[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("block", [b for b in PYTHON if b.how == "simulated device"], ids=str)
def test_tests_for_the_simulated_device_pass(block):
    if not hasattr(ctypes.CDLL(None), "sim_cuda_calls"):
        pytest.skip("is for the simulated CUDA device, not for a real one")
    namespace = {}
    block.run(namespace)
    tests = [test for name, test in namespace.items() if name.startswith("test_")]
    for test in tests:
        test()
    assert tests


def test_few_blocks_are_not_run():
    left_out = [f"{block}: {block.how}" for block in PYTHON if block.how.startswith("not run:")]
    assert len(left_out) <= MOST_NOT_RUN, "\n".join(left_out)


TESTED_SOURCES = "\n".join(
    file.read_text()
    for folder in ("examples/cpp_app", "tests/consumer", "tests/cpp")
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in {".cpp", ".h", ".txt"}
)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in {"cpp", "cmake"}], ids=str)
def test_code_in_cpp_is_part_of_a_program_that_is_tested(block):
    sources = textwrap.dedent(TESTED_SOURCES)
    depths = (textwrap.indent(textwrap.dedent(block.code), " " * depth) for depth in (0, 2, 4))
    assert any(code in sources for code in depths)


def test_commands_exist():
    shown = "\n".join(block.code for block in BLOCKS if block.language == "")
    commands = set(re.findall(r"^(?:\$ )?(?:python -m )?brimful ([a-z]+)", shown, re.M))
    assert commands and commands <= set(_COMMANDS), commands
    targets = set(re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", (ROOT / "Makefile").read_text(), re.M))
    wanted = set(re.findall(r"^make ([a-z-]+)", shown, re.M))
    assert wanted <= targets, wanted - targets


def headings_of(page):
    """Without their level, as the anchors of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_files_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target, anchor in LINK.findall(text):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in headings_of(file), f"{target}#{anchor}"


@pytest.mark.parametrize(
    "page",
    [page for page in LINKING if page.name != "CHANGELOG.md"],  # whose releases have the same ones
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_a_heading_stands_once_in_a_page(page):
    headings = headings_of(page)
    assert sorted(headings) == sorted(set(headings))


def test_every_public_header_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").rglob("*.md"))
    headers = (ROOT / "csrc" / "include").rglob("*.h")
    names = {header.relative_to(ROOT / "csrc" / "include").as_posix() for header in headers}
    missing = {name for name in names if f"## {name}\n" not in pages}
    assert missing == {"brimful/brimful.h", "brimful/export.h"}


def test_everything_in_python_is_in_the_reference():
    page = (ROOT / "docs" / "api" / "python.md").read_text()
    missing = {name for name in brimful.__all__ if f"brimful.{name}\n" not in page}
    assert missing == {"__version__", "cmake_prefix_path"}


@pytest.mark.parametrize(
    ("page", "files", "calls_there"),
    [("0012-house", 40, -1), ("0017-walks", 40, 40), ("0018-recipes", 60, 10)],
)
def test_the_map_of_the_code_names_what_is_there(page, files, calls_there):
    """Paths of the design page, and `file`, `function` in a step of its walks."""
    text = (ROOT / f"docs/design/{page}.md").read_text()
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)(?:`|: )", text)
    places = [ROOT, ROOT / "csrc"]
    missing = [path for path in named if not any((place / path).exists() for place in places)]
    assert len(named) > files and missing == []
    calls = re.findall(r"`([\w/.]+/[\w.]+\.\w+)`, `([\w:.]+)`", text)
    unknown = [
        (path, function)
        for path, function in calls
        if not any(
            re.search(rf"\b{re.split('[:.]', function)[-1]}\(", (place / path).read_text())
            for place in places
            if (place / path).exists()
        )
    ]
    assert len(calls) > calls_there and unknown == []


def test_each_capability_of_each_kind_of_step_has_its_test():
    text = (ROOT / "docs/design/0019-capabilities.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 13 and {len(row) for row in rows[2:]} == {6}
    for row in rows[2:]:
        for cell in row[1:]:
            named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
            assert len(named) == 1 or cell == "—", cell
            for path, name in named:
                source = (ROOT / "tests/python" / path).read_text()
                assert re.search(rf"^ *def {name}\(", source, re.MULTILINE), cell


MOST_WORDS = 700


def test_the_readme_is_short_and_names_its_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert len(re.findall(r"\S*\w\S*", readme)) <= MOST_WORDS
    assert readme.index("## One GPU") < readme.index("brimful.DistributedDataParallel(")
    for command in ("`make demo`", "`make test`"):
        assert command in readme
