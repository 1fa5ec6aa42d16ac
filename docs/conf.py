"""How Sphinx makes the pages: `make docs`. GitHub shows the same Markdown by itself."""

import importlib.metadata
import os
import pathlib
import re
import sys

# The kernels of the notebooks inherit these, and find the command `halfstep`.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # docs/costs.md: float16 on some processors.
os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

project = "Halfstep"
author = "The authors of Halfstep"
version = release = importlib.metadata.version("halfstep")
sys.path.insert(0, str(pathlib.Path(__file__).parent / "_extensions"))
extensions = ["api", "notebooks", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "notebooks/*.ipynb"]

nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_timeout = 180  # Seconds a cell.
nb_execution_show_tb = True
nb_output_stderr = "remove"
nb_merge_streams = True

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["halfstep.css"]
html_theme_options = {"navigation_with_keys": False}

# The anchors that GitHub makes of headings.
myst_heading_anchors = 4

# A name in single backticks is a link where it is documented, and code where it is not.
default_role = "py:obj"
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
add_module_names = False

REPOSITORY = pathlib.Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "ARCHITECTURE.md": "architecture.md"}
PAGES["CONTRIBUTING.md"] = "contributing.md"
"""Files at the top of the repository, and the pages that stand for them here."""


def link_inside(text: str, folder: pathlib.Path, page: pathlib.Path) -> str:
    """Turns links of a file in `folder`, shown as part of `page`, into links between the pages."""

    def moved(match: re.Match) -> str:
        path, mark, anchor = match[1].partition("#")
        target = (folder / path).resolve()
        if not path or not target.exists() or not target.is_relative_to(REPOSITORY):
            return match[0]
        name = str(target.relative_to(REPOSITORY))
        target = REPOSITORY / "docs" / PAGES[name] if name in PAGES else target
        # Markdown elsewhere is no page: it comes along as a file.
        scheme = "" if target.suffix != ".md" or target.is_relative_to(REPOSITORY / "docs") else "path:"
        return f"]({scheme}{os.path.relpath(target, page.parent)}{mark}{anchor})"

    return re.sub(r"\]\(([^()\s]+)\)", moved, text)


def read_page(app, name, source):
    page = pathlib.Path(app.env.doc2path(name))
    source[0] = link_inside(source[0], page.parent, page)


def read_included(app, path, parent, source):
    page = pathlib.Path(app.env.doc2path(parent))
    source[0] = link_inside(source[0], (page.parent / path).resolve().parent, page)


def setup(app):
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
