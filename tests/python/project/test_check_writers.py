"""tools/check_writers.py finds who writes a struct's fields: as clang sees it, in the pass of tools/tidy.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from check_writers import Place, Write, problems  # noqa: E402

HEADER = """
#pragma once
#include <memory>
#include <optional>
#include <utility>
#include <vector>
struct Part { int n = 0; std::vector<int> list; void renew() { n = 0; } };
struct State {
  int n = 0;
  const int fixed = 0;
  Part part;
  std::vector<Part> parts;
  std::optional<Part> some;
  std::shared_ptr<Part> apart;
  struct Inner { int n = 0; };
  Inner inner;
  void own();
  void own(Inner& inner);
  static State& global();
};
inline void fill(std::vector<int>& list) { list.clear(); }
inline void renew(Part& part) { part.n = 0; }
inline int sum(const std::vector<int>& list) { return list.empty() ? 0 : list[0]; }
"""
OWN = """
#include "a/state.h"
void own(State& s) { s.n = 1; }
"""
# In a file that is not the struct's own, each as the body of f(s, p, shared).
WRITES = {
    "assigned": "s.n = 1;",
    "through_a_pointer": "p->n += 1;",
    "through_a_shared_pointer": "shared->n = 1;",
    "through_an_object_that_a_pointer_has": "(*shared).n = 1;",
    "counted_up": "s.n++;",
    "an_object": "s.part = {};",
    "a_field_of_a_field": "s.part.n = 1;",
    "a_list_of_a_field": "s.part.list.push_back(1);",
    "an_element": "s.parts[0].n = 1;",
    "the_last_element": "s.parts.back().n = 1;",
    "what_an_optional_has": "s.some->n = 1;",
    "elements_in_a_loop": "for (auto& part : s.parts) { part.n = 1; }",
    "by_a_local_name": "auto& part = s.parts[0]; part.n = 1;",
    "by_a_call": "fill(s.part.list);",
    "exchanged": "std::exchange(s.n, 1);",
    "moved": "const auto parts = std::move(s.parts);",
    "in_a_lambda": "const auto later = [&] { s.n = 1; }; later();",
    "a_global": "State::global().n = 1;",
}
READS = {
    "read": "const int n = s.n + sum(s.part.list);",
    "found": "const auto first = s.parts.begin();",
    "copied": "State own = s; own.n = 1; own.parts.push_back({});",
    "made": "std::vector<Part> own(2); own[0].n = 1; for (auto& part : own) { part.n = 2; }",
    "called": "s.own();",
    "renewed": "s.part.renew();",
    "handed_on": "renew(s.part);",
}


def function(name, body):
    return f"void {name}(State& s, State* p, const std::shared_ptr<State>& shared) {{ {body} }}\n"


@pytest.fixture
def writers(tmp_path):
    """writers({path in csrc: text}): exit status and lines, of a project of these files."""

    def run(sources, layers=()):
        csrc, build = tmp_path / "csrc", tmp_path / "build"
        build.mkdir()
        for path, text in ({"a/state.h": HEADER, "a/state.cpp": OWN} | sources).items():
            file = csrc / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        command = f"c++ -std=c++20 -I{csrc} -c x.cpp"
        entries = [{"file": str(file), "command": command} for file in csrc.rglob("*.cpp")]
        (build / "compile_commands.json").write_text(json.dumps(entries))
        program = [sys.executable, str(ROOT / "tools" / "tidy.py"), "--csrc", str(csrc), str(build)]
        done = subprocess.run([*program, *layers], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines()[:-1]

    return run


def other(body):
    return f'#include "a/state.h"\n{body}'


def test_every_form_of_a_write_is_found_and_no_read(writers):
    forms = [function(name, body) for name, body in (WRITES | READS).items()]
    status, lines = writers({"b/other.cpp": other("".join(forms))})
    assert status == 1
    found = next(line for line in lines if line.startswith("outside csrc/a/state.h State:"))
    assert [place.split()[-1] for place in found.split("): ")[1].split(", ")] == list(WRITES)


def test_functions_of_its_own_files_and_methods_in_any_file_may_write(writers):
    methods = """
    void State::own() { n = 1; part.n = 2; }
    void State::own(Inner& inner) { inner.n = 1; }
    """
    status, lines = writers({"a/methods.cpp": other(methods)})
    assert (status, lines) == (0, [])


def test_a_struct_inside_of_a_class_may_be_written_by_that_class(writers):
    header = "class Box { struct State; void put(State& state); State* state_; };\n"
    state = '#include "a/box.h"\nstruct Box::State { int n = 0; };\n'
    source = '#include "c/box_state.h"\nvoid Box::put(State& state) { state.n = 1; }\n'
    sources = {"a/box.h": f"#pragma once\n{header}", "c/box_state.h": f"#pragma once\n{state}"}
    assert writers(sources | {"c/put.cpp": source}) == (0, [])


@pytest.fixture
def judged(tmp_path):
    """judged(writes in the struct's own file, and elsewhere; lines of the list): the problems."""
    csrc = tmp_path / "csrc"
    (tmp_path / "tools").mkdir()
    for path, text in {"a/state.h": "struct State {", "a/state.cpp": "", "b/other.cpp": ""}.items():
        file = csrc / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text or "".join(f"void f{i}() {{\n" for i in range(9)))
    struct = Place(csrc / "a" / "state.h", 1, 1)

    def run(own, outside, listed=""):
        (tmp_path / "tools" / "writers.txt").write_text(f"# none\n{listed}")
        places = [Place(csrc / "a" / "state.cpp", i + 1, 1) for i in range(own)]
        places += [Place(csrc / "b" / "other.cpp", i + 1, 1) for i in range(outside)]
        return problems({Write(struct, None, place, None) for place in places}, csrc)

    return run


def test_functions_that_write_are_counted(judged):
    assert judged(8, 0) == []
    [problem] = judged(9, 0)
    assert problem.startswith(
        "writers csrc/a/state.h State: 9 are too many (at most 8): csrc/a/state.cpp:1 f0, "
    )


def test_the_list_can_only_shrink(judged):
    what = "outside csrc/a/state.h State"
    listed = {
        f"{what} 2": [],
        f"{what} 1": [
            f"{what}: 2 are too many (at most 1): csrc/b/other.cpp:1 f0, csrc/b/other.cpp:2 f1"
        ],
        f"{what} 3": [f"{what}: has shrunk to 2; say so in tools/writers.txt (3)"],
        f"{what} 2\nwriters csrc/b.h B 9": [
            "writers csrc/b.h B: needs no line in tools/writers.txt any more"
        ],
    }
    for text, wanted in listed.items():
        assert judged(1, 2, text) == wanted
    not_needed = "writers csrc/a/state.h State"
    assert judged(8, 0, f"{not_needed} 9") == [
        f"{not_needed}: needs no line in tools/writers.txt any more"
    ]


def test_some_layers_alone_are_not_judged(writers):
    sources = {"b/other.cpp": other(function("one", "s.n = 1;"))}
    assert writers(sources, layers=["b"]) == (0, [])


def test_what_clang_tidy_finds_by_itself_is_still_a_finding(writers):
    finding = "const int* none() { return 0; }\n"  # modernize-use-nullptr
    status, lines = writers({"b/other.cpp": other(finding + function("one", "s.n = 1;"))})
    text = "\n".join(lines)
    assert status == 1
    assert text.count("/b/other.cpp:") == 2 and "[modernize-use-nullptr" in text  # with the writer
    assert "custom-writes" not in text and "outside csrc/a/state.h State: 1 are too many" in text
