"""tools/check_sizes.py finds what is too large, and lines of its list that are not needed."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import check_sizes  # noqa: E402

FUNCTION = """
namespace brimful {{
/// A brace {{ in a comment.
int Box::sum(
    int first) const {{
  const char* text = "}} )";
  for (int i = 0; i < 3; ++i) {{
{lines}
  }}
  return first;
}}
}}  // namespace brimful
"""
CLASS = """
template <typename T>
class BRIMFUL_API Box : public Base<T> {{
 public:
  explicit Box(int n);
  ~Box();
  int overloaded(int n) const;
  int overloaded(double n) const {{ return 0; }}
{methods}
  static int counted();
  using Pair = std::pair<int, int>;

 protected:
  void hidden();

 private:
  struct Inner {{
    int a, b;
  }};
  std::function<int(int)> apart_;
{fields}
}};
"""


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "tools/large.txt", "# none\n")
    return tmp_path


def lines(count, line="    use(i);"):
    return "\n".join([line] * count)


def members(count, form):
    return "\n".join(form.format(i) for i in range(count))


@pytest.mark.parametrize(("count", "found"), [(53, 0), (54, 1)])
def test_a_function_is_counted_from_its_first_line_to_its_brace(root, count, found):
    write(root, "csrc/base/box.cpp", FUNCTION.format(lines=lines(count)))
    problems = check_sizes.problems(root)
    assert len(problems) == found
    assert all("function csrc/base/box.cpp Box::sum: 61 are" in problem for problem in problems)


@pytest.mark.parametrize(("path", "most"), [("csrc/a/a.h", 150), ("csrc/a/a.cpp", 400)])
def test_the_lines_of_a_file_are_counted(root, path, most):
    write(root, path, "// a\n" * most)
    assert check_sizes.problems(root) == []
    write(root, path, "// a\n" * (most + 1))
    assert f"{most + 1} are too many" in check_sizes.problems(root)[0]


def test_headers_of_tests_are_counted_and_their_sources_are_not(root):
    write(root, "tests/cpp/a/help.h", "// a\n" * 151)
    write(root, "tests/cpp/a/test_a.cpp", "// a\n" * 401)
    assert len(check_sizes.problems(root)) == 1


@pytest.mark.parametrize(("count", "found"), [(23, 0), (24, 1)])
def test_public_methods_are_counted_by_name(root, count, found):
    methods = members(count, "  virtual void m{}(int n) = 0;")  # beside overloaded() and counted()
    write(root, "csrc/a/a.h", CLASS.format(methods=methods, fields=""))
    problems = check_sizes.problems(root)
    assert len(problems) == found
    assert all("class csrc/a/a.h Box: 26 are too many" in problem for problem in problems)


@pytest.mark.parametrize(("count", "found"), [(27, 0), (28, 1)])
def test_methods_of_any_access_are_counted_by_name(root, count, found):
    hidden = "\n private:\n" + members(count, "  void m{}(int n);") + "\n public:\n"
    write(root, "csrc/a/a.h", CLASS.format(methods=hidden, fields=""))
    problems = check_sizes.problems(root)
    assert len(problems) == found
    assert all("methods csrc/a/a.h Box: 31 are too many" in problem for problem in problems)


@pytest.mark.parametrize(("count", "found"), [(48, 0), (49, 1)])
def test_the_lines_of_a_class_are_counted_over_all_files_of_its_folder(root, count, found):
    write(root, "csrc/include/brimful/a/a.h", CLASS.format(methods="", fields=""))
    for i in range(9):
        write(root, f"csrc/a/part_{i}.cpp", FUNCTION.format(lines=lines(count if i == 0 else 46)))
    write(root, "csrc/b/other.cpp", FUNCTION.format(lines=lines(40)))
    problems = check_sizes.problems(root)
    assert len(problems) == found
    assert all("extent csrc/a Box: 501 are too many" in problem for problem in problems)


@pytest.mark.parametrize(("count", "found"), [(19, 0), (20, 1)])
def test_fields_are_counted_and_types_and_names_of_types_are_not(root, count, found):
    fields = members(count, "  std::map<int, std::vector<int>> f{}_{{{{1, {{}}}}}};")
    write(root, "csrc/a/a.h", CLASS.format(methods="", fields=fields))
    problems = check_sizes.problems(root)
    assert len(problems) == found
    assert all("state csrc/a/a.h Box: 21 are too many" in problem for problem in problems)


def test_a_record_without_methods_may_have_many_fields(root):
    write(root, "csrc/a/a.h", f"struct Facts {{\n{members(30, '  int f{} = 0;')}\n}};\n")
    assert check_sizes.problems(root) == []


def test_functions_of_python_are_counted_without_their_docstring(root):
    docstring = '    """One.\n\n' + "    More.\n" * 70 + '    """\n'
    body = "    a = 1\n"
    write(root, "python/brimful/a.py", f"def f():\n{docstring}{body * 59}")
    assert check_sizes.problems(root) == []
    body = "        a = 1\n"
    write(root, "python/brimful/a.py", f"class A:\n    def f(self):\n{body * 60}")
    assert "function python/brimful/a.py A.f: 61 are" in check_sizes.problems(root)[0]


def test_the_list_can_only_shrink(root):
    write(root, "csrc/a/a.h", "// a\n" * 160)
    listed = {
        "header csrc/a/a.h 160": [],
        "header csrc/a/a.h 159": ["header csrc/a/a.h: has grown to 160 (tools/large.txt: 159)"],
        "header csrc/a/a.h 161": ["header csrc/a/a.h: has shrunk to 160"],
        "header csrc/a/a.h 160\nheader csrc/b.h 151": ["header csrc/b.h: needs no line"],
    }
    for text, wanted in listed.items():
        write(root, "tools/large.txt", text + "\n")
        problems = check_sizes.problems(root)
        assert len(problems) == len(wanted)
        assert all(part in problem for part, problem in zip(wanted, problems, strict=True))


def test_this_project_keeps_to_its_sizes():
    assert check_sizes.problems() == []
