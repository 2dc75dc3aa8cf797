"""The public headers as XML for breathe: runs doxygen, and leaves out what is private or foreign."""

import re
import subprocess
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

DOCS = Path(__file__).resolve().parent.parent
XML = DOCS.parent / "build" / "doxygen" / "xml"
LEFT_OUT = re.compile(
    r'\s*<sectiondef kind="private-.*?</sectiondef>|\s*<innernamespace [^>]*>(?!brimful).*?</innernamespace>',
    re.DOTALL,
)


def make_xml(app: Sphinx) -> None:
    XML.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["doxygen", str(DOCS / "Doxyfile")], cwd=DOCS.parent, capture_output=True, text=True
    )
    if done.returncode:
        raise ExtensionError(f"doxygen failed\n{done.stderr}")
    for file in XML.glob("*.xml"):  # doxygen hides private members in HTML only
        text = file.read_text()
        if (public := LEFT_OUT.sub("", text)) != text:
            file.write_text(public)


def setup(app: Sphinx) -> dict[str, bool]:
    app.config.breathe_projects = {"brimful": str(XML)}
    app.config.breathe_default_project = "brimful"
    app.connect("builder-inited", make_xml)
    return {"parallel_read_safe": True}
