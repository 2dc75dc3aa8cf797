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
MODULES = sorted((ROOT / "python").rglob("*.py"))
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


def prose_of(page: Path) -> str:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "", text)


def replaced_in(prose: str) -> dict[str, str]:
    return {
        prose[max(0, hit.start() - 30) : hit.end() + 20].replace("\n", " "): instead
        for pattern, instead in REPLACED.items()
        for hit in re.finditer(pattern, prose, flags=re.IGNORECASE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    assert replaced_in(prose_of(page)) == {}


def docstrings_of(module: Path) -> str:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, kinds)]
    return re.sub(r"``[^`]*``", "", "\n".join(ast.get_docstring(node) or "" for node in nodes))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_docstrings_use_the_words_of_the_glossary(module: Path) -> None:
    assert replaced_in(docstrings_of(module)) == {}


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: str(header.relative_to(ROOT)))
def test_public_headers_use_the_words_of_the_glossary(header: Path) -> None:
    comments = re.findall(r"//+ ?<? ?(.*)", header.read_text())
    assert replaced_in(re.sub(r"`[^`]*`", "", " ".join(comments))) == {}
