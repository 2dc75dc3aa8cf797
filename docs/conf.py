"""The site: `make docs` writes it to build/docs. Pages are Markdown that reads well on a code host too."""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_extensions"))

project = "brimful"
release = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["version"]
author = "The brimful authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "breathe", "cpp_headers", "repository_links"]
exclude_patterns = ["_extensions", "_static"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # extras
autodoc_default_options = {"members": True, "undoc-members": True}
python_maximum_signature_line_length = 100
cpp_maximum_signature_line_length = 100
highlight_language = "none"  # of blocks that name none: output, commands
toc_object_entries = False  # headings are enough for the margin

# Each header opens the namespaces again.
suppress_warnings = ["duplicate_declaration.cpp"]

html_theme = "furo"
html_title = f"brimful {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
