"""Checks that headers, sources, functions and classes stay small enough to be read: see LIMITS.

What is larger has a line in tools/large.txt, with its size. That list can only shrink: what has grown beyond its line,
or does not need it as it is, is a problem too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "header": 150,  # lines
    "source": 400,
    "function": 60,  # lines, from the first to the closing brace; in Python without the docstring
    "class": 25,  # public methods, each name once
    "methods": 30,  # of any access, each name once
    "extent": 500,  # lines of a class in all files of its folder
    "state": 20,  # fields of a class, or of a struct that has methods: what has none is a record
}
TEXTS = r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:[^"\\\n]|\\.)*"|(?<!\w)\'(?:[^\'\\\n]|\\.)*\''
TYPE = re.compile(r"(?:template\b.*?>\s*)?(class|struct)\b([^={(]*)\{")
ACCESS = ("public:", "protected:", "private:")
Size = tuple[str, str, int]  # kind, name, size


def without_texts(code: str) -> str:
    """The same lines without comments, literals and directives."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    code = re.sub(TEXTS, blank, code, flags=re.DOTALL)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, code, flags=re.MULTILINE)


def statements(lines: list[str]) -> Iterator[list[str]]:
    """Declarations and definitions of one level, each begun on a line of its own, as clang-format has them."""
    chunk: list[str] = []
    depth = 0
    for line in lines:
        text = line.strip()
        if not chunk and (not text or text == "}" or re.match(r"(inline )?namespace\b.*\{$", text)):
            continue  # what a namespace has is on the level around it
        chunk.append(line)
        depth += sum((c in "({[") - (c in ")}]") for c in line)
        if depth == 0 and (text.endswith((";", "}")) or text in ACCESS):
            yield chunk
            chunk = []


def without_templates(text: str) -> str:
    while (shorter := re.sub(r"<[^<>;]*>", "", text)) != text:
        text = shorter
    return text


def declared(text: str) -> tuple[str, str]:
    """Whether a member is a "method", a "field" or "other", and its name."""
    text = re.sub(r"\[\[\w+\]\]|\boperator\(\)", " ", without_templates(text)).strip()
    if re.match(r"(using|friend|static|typedef|enum|template|constexpr|inline)\b", text):
        text = re.sub(r"^template\s*", "", text)
        if not re.search(r"\(", text) or text.startswith(("using", "friend", "typedef")):
            return "other", ""
    head = re.split(r"[={]", text)[0]
    if "(" in head:
        return "method", re.split(r"[\s*&]", head.split("(")[0].strip())[-1]
    return "field", head.strip(" ;")


def sizes_in(lines: list[str], outer: str = "") -> Iterator[Size]:
    """Of the functions and types of C++ lines."""
    for chunk in statements(lines):
        text = " ".join(line.strip() for line in chunk)
        if found := TYPE.match(text):
            name = re.split(r"(?<!:):(?!:)", re.sub(r"\bfinal\b", "", found.group(2)))[0].split()
            yield from sizes_of_type(chunk, found.group(1), outer + (name[-1] if name else "?"))
            continue
        head = without_templates(text).split("{")[0]
        if "(" in head and "{" in text and text.endswith("}"):
            before = re.sub(r"\boperator\(\)", "operator", head).split("(")[0]
            name = re.split(r"[\s*&]", before.strip())[-1]
            yield "function", outer + name, len(chunk)
            if not outer and "::" in name:
                yield "extent", name.rpartition("::")[0], len(chunk)


def sizes_of_type(chunk: list[str], key: str, name: str) -> Iterator[Size]:
    first = next(i for i, line in enumerate(chunk) if "{" in line)
    public = key == "struct"
    methods: set[str] = set()
    public_ones: set[str] = set()
    fields, is_state = 0, key == "class"
    for member in statements(chunk[first + 1 : -1]):
        text = " ".join(line.strip() for line in member)
        if text in ACCESS:
            public = text == "public:"
        if text in ACCESS or TYPE.match(text) or re.match(r"(class|struct|enum)\b", text):
            continue
        kind, of = declared(text)
        fields += kind == "field"
        is_state |= kind == "method"
        if kind == "method" and of.lstrip("~") != name.split("::")[-1]:
            methods.add(of)
            public_ones |= {of} if public else set()
    yield "class", name, len(public_ones)
    yield "methods", name, len(methods)
    yield "extent", name, len(chunk)
    yield "state", name, fields if is_state else 0
    yield from sizes_in(chunk[first + 1 : -1], name + "::")


def cpp_sizes(path: Path) -> Iterator[Size]:
    code = path.read_text()
    yield "header" if path.suffix == ".h" else "source", "", len(code.splitlines())
    yield from sizes_in(without_texts(code).splitlines())


def python_sizes(path: Path) -> Iterator[Size]:
    tree = ast.parse(path.read_text())
    for outer in ast.walk(tree):
        for node in ast.iter_child_nodes(outer):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (node.end_lineno or 0) - node.lineno + 1
                if body is not node.body:
                    lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                prefix = f"{outer.name}." if isinstance(outer, ast.ClassDef) else ""
                yield "function", prefix + node.name, lines


def all_sizes(root: Path) -> Iterator[tuple[str, Size]]:
    """Of csrc/ and python/, and of the tests' headers."""
    extents: dict[tuple[str, str], int] = {}  # a class's body, and what it has outside of that
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix in {".h", ".cpp"}:
            for kind, name, size in cpp_sizes(path):
                if kind == "extent":
                    folder = path.parent.relative_to(root / "csrc").as_posix()
                    where = folder.removeprefix("include/brimful/"), name
                    extents[where] = extents.get(where, 0) + size
                else:
                    yield path.relative_to(root).as_posix(), (kind, name, size)
    yield from ((f"csrc/{folder}", ("extent", name, n)) for (folder, name), n in extents.items())
    for path in sorted((root / "tests" / "cpp").rglob("*.h")):
        lines = len(path.read_text().splitlines())
        yield path.relative_to(root).as_posix(), ("header", "", lines)
    for path in sorted((root / "python").rglob("*.py")):
        yield from ((path.relative_to(root).as_posix(), size) for size in python_sizes(path))


def problems(root: Path = ROOT) -> list[str]:
    listed: dict[str, int] = {}
    for line in (root / "tools" / "large.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            what, size = line.rsplit(None, 1)
            listed[what] = int(size)
    found = []
    for path, (kind, name, size) in all_sizes(root):
        what = f"{kind} {path} {name}".strip()
        if size <= LIMITS[kind]:
            continue
        allowed = listed.pop(what, None)
        if allowed is None:
            found.append(f"{what}: {size} are too many (at most {LIMITS[kind]}); take it apart")
        elif size > allowed:
            found.append(f"{what}: has grown to {size} (tools/large.txt: {allowed})")
        elif size < allowed:
            found.append(f"{what}: has shrunk to {size}; say so in tools/large.txt ({allowed})")
    return found + [f"{what}: needs no line in tools/large.txt any more" for what in listed]
