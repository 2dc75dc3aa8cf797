"""docs/migration: both sides of each diff run, and print the same."""

import contextlib
import functools
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from rank_processes import run_ranks

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "migration"
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Programs that are started once a rank; the others are one process.
RANKS = {"torch-ddp": (2, 2), "data-parallel": (1, 2), "torch-pipelining": (2, 2)}
OTHERS = {"accelerate", "GPUtil", "torchgpipe", "torchinfo"}

PAGES = [
    pytest.param(page.stem, diff, id=f"{page.stem}-{number}")
    for page in sorted(FOLDER.glob("*.md"))
    for number, diff in enumerate(DIFF.findall(page.read_text()))
]


def side(diff, sign):
    """The program before ("-") or after ("+") the change."""
    lines = (line for line in diff.splitlines() if line[:1] in (" ", sign, ""))
    return "\n".join(line[1:] for line in lines) + "\n"


def program_job(rank, source):
    # The group is there already; torchrun's variables are not.
    dist.init_process_group = lambda *_, **__: None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "migration", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@functools.cache
def printed_by(source, size):
    missing = [
        name for name in OTHERS if f" {name}" in source and not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"needs {missing[0]}")
    first, *others = run_ranks(program_job, source, size=size, watchdog_s=60)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(("page", "diff"), PAGES)
def test_the_program_after_the_change_runs_and_prints(page, diff):
    assert printed_by(side(diff, "+"), RANKS.get(page, (1, 1))[1]).strip()


@pytest.mark.parametrize(("page", "diff"), PAGES)
def test_the_program_before_the_change_prints_the_same(page, diff):
    before, after = RANKS.get(page, (1, 1))
    expected = printed_by(side(diff, "-"), before)
    assert printed_by(side(diff, "+"), after) == expected


def test_every_page_has_a_diff_and_is_in_the_list():
    pages = {page.stem for page in FOLDER.glob("*.md")} - {"README"}
    assert pages == {parameter.values[0] for parameter in PAGES}
    listed = (FOLDER / "README.md").read_text()
    assert all(f"({page}.md)" in listed for page in pages)
