"""How `make docs` builds the manual. It needs no network, and neither does who reads the result."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
sys.path.insert(0, str(HERE.parent))

from ckptfs import __version__  # noqa: E402 - found by the path above

project = "ckptfs"
author = "The ckptfs authors"
copyright = "The ckptfs authors. Apache-2.0"  # noqa: A001 - Sphinx's name
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "diagrams",
    "docstrings",
    "modules",
    "navigation",
    "repository",
]
exclude_patterns = ["_ext"]

# Headings have the anchors that repository viewers give them.
myst_heading_anchors = 4
# "repository:" is where docs/_ext/repository.py sends links that leave docs/.
myst_enable_extensions = ["deflist"]
myst_url_schemes = ("http", "https", "mailto", "repository")

smartquotes = False  # a value is "async", as it is typed

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"ckptfs {release}"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
