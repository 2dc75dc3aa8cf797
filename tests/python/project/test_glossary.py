"""The words of CONTRIBUTING's glossary, in what users read."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("README.md")]
)
HEADERS = sorted((ROOT / "csrc" / "include").rglob("*.h"))
SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h"))
CPP_TESTS = sorted(p for p in (ROOT / "tests" / "cpp").rglob("*") if p.suffix in (".cpp", ".h"))
MODULES = sorted((ROOT / "python").rglob("*.py"))
TESTS = sorted((ROOT / "tests" / "python").rglob("*.py"))
PROGRAMS = sorted(p for f in ("benchmarks", "examples", "tools") for p in (ROOT / f).rglob("*.py"))
#: What the glossary replaces; code in backticks may have any name.
REPLACED = {
    r"\b(tells?|told)\b": "inform, report, show",
    r"\b(hears?|heard)\b": "is informed, learns",
    r"\b(leaves?|left) word\b": "posts its failure",
    r"\bbuckets? (leaves?\b|left\b|has left|have left)": "is launched",
    r"\b(its|their|the error's) words\b": "message, text",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bwire (format|type)\b": "reduction dtype",
}
#: In messages and comments no word of the sources' private names either.
IN_MESSAGES = REPLACED | {
    r"\bwords\b": "message, text",
    r"\b(nobody|somebody)\b": "no rank, another rank",
    r"\b(wire|foreign)\b": "reduction dtype, torch's DistributedDataParallel",
}
#: Parts of names that the glossary has another word for.
IN_NAMES = {
    "tell",
    "tells",
    "told",
    "hear",
    "hears",
    "heard",
    "mend",
    "foreign",
    "nobody",
    "somebody",
}


def prose_of(page: Path) -> str:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "", text)


def replaced_in(prose: str, words: dict[str, str] = REPLACED) -> dict[str, str]:
    return {
        prose[max(0, hit.start() - 30) : hit.end() + 20].replace("\n", " "): instead
        for pattern, instead in words.items()
        for hit in re.finditer(pattern, prose, flags=re.IGNORECASE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    assert replaced_in(prose_of(page)) == {}


def prose_in(module: Path) -> str:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    text = module.read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    prose = [ast.get_docstring(node) or "" for node in nodes] + re.findall(r"#:? (.*)", text)
    return re.sub(r"``[^`]*``", "", "\n".join(prose))


@pytest.mark.parametrize("module", MODULES + PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_comments_use_the_words_of_the_glossary(module: Path) -> None:
    assert replaced_in(prose_in(module)) == {}


def comments_of(source: Path) -> str:
    return re.sub(r"`[^`]*`", "", " ".join(re.findall(r"//+ ?<? ?(.*)", source.read_text())))


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: str(header.relative_to(ROOT)))
def test_public_headers_use_the_words_of_the_glossary(header: Path) -> None:
    assert replaced_in(comments_of(header)) == {}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_comments_of_sources_use_the_words_of_the_glossary(source: Path) -> None:
    assert replaced_in(comments_of(source), IN_MESSAGES) == {}


def names_of(test: Path) -> str:
    """Of its cases and sections, which may stand on several lines."""
    named = re.findall(r'(?:TEST_CASE|SECTION)\(((?:\s*"(?:[^"\\\n]|\\.)*")+)', test.read_text())
    return "\n".join(re.sub(r'"\s*"', "", name) for name in named)


@pytest.mark.parametrize("test", CPP_TESTS, ids=lambda test: str(test.relative_to(ROOT)))
def test_names_and_comments_of_tests_in_cpp_use_the_words_of_the_glossary(test: Path) -> None:
    assert replaced_in(comments_of(test) + "\n" + names_of(test), IN_MESSAGES) == {}


def texts_of(source: Path) -> list[str]:
    """Literals of more than one word, those that stand behind each other as one."""
    code = re.sub(r"^\s*(#include|//).*$", "", source.read_text(), flags=re.MULTILINE)
    literals = re.findall(r'"(?:[^"\\\n]|\\.|"\s*")*"', code)
    return [literal for literal in literals if " " in literal]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_messages_of_sources_use_the_words_of_the_glossary(source: Path) -> None:
    assert replaced_in("\n".join(texts_of(source)), IN_MESSAGES) == {}


def test_names_in_sources_use_the_words_of_the_glossary() -> None:
    scripts = sorted((ROOT / "csrc").rglob("*.js"))
    parts = re.compile(r"[A-Z]?[a-z]+")
    found = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in [*SOURCES, *MODULES, *scripts]
        for name in set(
            re.findall(r"[A-Za-z_]\w+", re.sub(r'"[^"\n]*"|(//|#).*', "", path.read_text()))
        )
        if IN_NAMES & {part.lower() for part in parts.findall(name)}
    ]
    assert len(scripts) > 1 and found == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_messages_of_modules_use_the_words_of_the_glossary(module: Path) -> None:
    tree = ast.parse(module.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]
    assert replaced_in("\n".join(text for text in texts if " " in text), IN_MESSAGES) == {}


@pytest.mark.parametrize("test", TESTS, ids=lambda test: str(test.relative_to(ROOT)))
def test_names_and_prose_of_tests_use_the_words_of_the_glossary(test: Path) -> None:
    names = re.findall(r"^\s*def (test_\w*)", test.read_text(), flags=re.MULTILINE)
    assert replaced_in(" ".join(names).replace("_", " ") + "\n" + prose_in(test)) == {}
