"""The site of these documents: `sphinx-build -W --keep-going -c docs . site`.

It needs the extra `docs`. Sources are the documents and notebooks where they lie, and docstrings of
what the packages export. Notebooks are shown as they were run; nothing is executed. With `-W` it is
an error if a link leads nowhere, or nothing leads to a page.
"""

import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "dsv4-jax"
author = copyright = "The dsv4-jax authors"
_SOURCE = (ROOT / "dsv4_jax" / "__init__.py").read_text()
(version,) = re.findall(r'^__version__ = "(.*)"$', _SOURCE, re.MULTILINE)
release = version

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "examples/README.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "tests/README.md",
    "tools/README.md",
]
exclude_patterns = ["build", "site", ".venv"]

html_theme = "furo"
html_title = f"dsv4-jax {version}"
html_copy_source = False

myst_heading_anchors = 4  # links to headings are those of GitHub
myst_links_external_new_tab = True
nb_execution_mode = "off"
highlight_language = "none"  # of fences that name none

autodoc_typehints = "none"  # docstrings say dtype and shape
autodoc_member_order = "bysource"
default_role = "code"
napoleon_use_ivar = True  # else fields of named tuples are there twice
napoleon_custom_sections = [("Source", "notes_style")]

suppress_warnings = [
    "myst.header",  # a page may begin at any level
    "misc.highlighting_failure",
]


def mark_code(app, what, name, obj, options, lines):
    """Indented blocks of docstrings are code, as readers of the source see them."""
    marked = []
    for number, line in enumerate(lines):
        before = lines[max(number - 2, 0) : number]
        if line.startswith("    ") and len(before) == 2 and not before[1] and before[0][:1].strip():
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def setup(app):
    """What Sphinx calls first."""
    app.connect("autodoc-process-docstring", mark_code, priority=1)  # before napoleon
