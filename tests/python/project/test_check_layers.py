"""tools/check_layers.py finds includes that a layer may not have."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import check_layers  # noqa: E402


@pytest.fixture
def problems_of(tmp_path, monkeypatch):
    """The problems of one file with these lines."""
    monkeypatch.setattr(check_layers, "ROOT", tmp_path)

    def problems(path, *lines):
        file = tmp_path / "csrc" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines))
        return check_layers.check(file)

    return problems


@pytest.mark.parametrize("path", ["memory/file.cpp", "probes/host/file.h", "bindings/file.cpp"])
@pytest.mark.parametrize("header", ["filesystem", "experimental/filesystem"])
def test_the_standard_librarys_file_system_is_refused(problems_of, path, header):
    [problem] = problems_of(path, "#include <fstream>", f"#include <{header}>")
    assert problem == f"csrc/{path}:2: {header} may be bound to torch's own copy: call POSIX"


def test_a_file_that_only_has_the_name_is_none_of_it(problems_of):
    assert problems_of("memory/file.cpp", "// <filesystem>", '#include "memory/filesystem.h"') == []


def test_a_layer_includes_lower_ones_alone(problems_of):
    assert problems_of("step/file.cpp", '#include "memory/stats.h"') == []
    assert problems_of("memory/file.cpp", '#include "step/oom.h"') == [
        "csrc/memory/file.cpp:1: memory may not include step (step/oom.h)"
    ]


@pytest.mark.parametrize(
    ("path", "included"),
    [
        ("cuda_sim/values/file.cpp", "base/format.h"),
        ("cuda_sim/values/file.cpp", "brimful/error.h"),
        ("cuda_sim/values/file.cpp", "../../base/format.h"),
        ("probes/gpu/file.cpp", "cuda_sim/runtime/sim_cuda.h"),
    ],
)
def test_the_simulated_device_is_a_project_of_its_own(problems_of, path, included):
    [problem] = problems_of(path, f'#include "{included}"')
    assert problem == f"csrc/{path}:1: cuda_sim is a project of its own ({included})"


def test_the_simulated_device_includes_its_own_files(problems_of):
    assert problems_of("cuda_sim/values/file.cpp", '#include "../runtime/sim_cuda.h"') == []


@pytest.mark.parametrize(
    "line",
    [
        "const double number = std::strtod(begin, &end);",
        "return std::stod(text);",
        "atof (text)",
        "std::ostringstream out;",
        "std::stringstream both;",
        'std::snprintf(text, size, "%s %.1f", name, value);',
        'std::printf("%g", value);',
        'setlocale(LC_ALL, "");',
    ],
)
def test_numbers_by_the_locale_are_refused(problems_of, line):
    [problem] = problems_of("sizer/file.cpp", line)
    assert problem.startswith("csrc/sizer/file.cpp:1: depends on the locale")


def test_numbers_of_no_locale_are_not(problems_of):
    lines = [
        "std::stoll(text);",
        'std::printf("%zu %s", size, name);',
        "// as strtod( does",
        "TextStream out;",
    ]
    assert problems_of("sizer/file.cpp", *lines) == []
    assert problems_of("base/text_stream.h", "class TextStream : public std::ostringstream {") == []
