"""clang-tidy reads every source of csrc, those that are compiled as one too, and a finding in any fails `make tidy`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

CLEAN = "int {name}(int x) {{ return x + 1; }}\n"
FINDING = "const int* {name}() {{ return 0; }}\n"  # modernize-use-nullptr


@pytest.fixture
def tidy(tmp_path):
    """tidy(name of the source with a finding, layers): exit status and output, for sources a, b (as one) and c."""

    def run(bad, *layers):
        csrc, build = tmp_path / "csrc", tmp_path / "build"
        (build / "Unity").mkdir(parents=True)
        sources = {"a": csrc / "base" / "a.cpp", "b": csrc / "base" / "b.cpp"}
        sources["c"] = csrc / "step" / "c.cpp"
        for name, source in sources.items():
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text((FINDING if name == bad else CLEAN).format(name=name))
        unity = build / "Unity" / "one.cxx"
        unity.write_text("".join(f'#include "{sources[name]}"\n' for name in "ab"))
        command = "c++ -std=c++20 -c x.cpp"
        entries = [{"file": str(file), "command": command} for file in (unity, sources["c"])]
        (build / "compile_commands.json").write_text(json.dumps(entries))
        program = [sys.executable, str(ROOT / "tools" / "tidy.py"), "--csrc", str(csrc), str(build)]
        done = subprocess.run([*program, *layers], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_sources_without_a_finding_pass(tidy):
    status, output = tidy(None)
    assert (status, output) == (0, "clang-tidy: 3 sources, 0 of 2 groups with findings\n")


@pytest.mark.parametrize("bad", ["a", "b", "c"])
def test_a_finding_in_any_source_fails(tidy, bad):
    status, output = tidy(bad)
    assert status == 1
    assert f"/{bad}.cpp:1:" in output and "[modernize-use-nullptr" in output
    assert output.endswith("clang-tidy: 3 sources, 1 of 2 groups with findings\n")


def test_other_layers_than_those_named_are_left_out(tidy):
    status, output = tidy("c", "base")
    assert (status, output) == (0, "clang-tidy: 2 sources, 0 of 1 groups with findings\n")
