"""Links between the repository's files, made to fit the site.

Pages, and the files that they include, link to each other by paths that work on a code host. A file that is a page of
the site becomes a link to that page, and the words of a link to any other file stay without it. A path that leads
nowhere is a warning.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
OWN_PAGES = {"search", "genindex", "py-modindex"}  # that sphinx writes over a page of this name
PAGES = {"README.md": "index", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}

logger = logging.getLogger(__name__)


def page_of(file: Path, docs: Path) -> str | None:
    """The site's page that shows a file of the repository."""
    path = file.relative_to(docs.parent)
    if path.parts[0] == "docs" and path.suffix == ".md":
        return path.relative_to("docs").with_suffix("").as_posix()
    if path.parts[0] == "benchmarks" and path.name == "README.md":
        return f"performance/{path.parts[1]}"
    return PAGES.get(path.as_posix())


def fit_links(text: str, file: Path, docs: Path) -> str:
    def fit(link: re.Match[str]) -> str:
        words, target, anchor = link.groups()
        found = (file.parent / target).resolve()
        if target.startswith("/") or not found.exists():
            logger.warning("a link leads nowhere (link: %s)", target, location=str(file))
            return link[0]
        page = page_of(found, docs)
        return f"[{words}](/{page}.md{anchor or ''})" if page else words

    return LINK.sub(fit, text)


def on_page(app: Sphinx, name: str, source: list[str]) -> None:
    docs = Path(app.srcdir)
    if name in OWN_PAGES:
        logger.warning("sphinx has a page of this name (page: %s); rename it", name)
    source[0] = fit_links(source[0], docs / f"{name}.md", docs)


def on_include(app: Sphinx, file: Path, name: str, source: list[str]) -> None:
    docs = Path(app.srcdir)
    source[0] = fit_links(source[0], (docs / file).resolve(), docs)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", on_page)
    app.connect("include-read", on_include)
    return {"parallel_read_safe": True}
