"""The pages in `notebooks/`: myst-nb executes them, and each gets an .ipynb file of the same text, without outputs."""

import hashlib
import importlib.metadata
import logging as python_logging
import os
import pathlib
import re

import nbformat
from jupyter_cache import get_cache
from jupyter_cache.executors import load_executor
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.util import logging

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
PACKAGES = ("scaler", "loops", "halfstep")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
"""A link to a page: its text, path and anchor."""
LOGGER = logging.getLogger(__name__)


def notebooks():
    """Their sources: the pages in the folder but its index."""
    return [page for page in sorted(FOLDER.glob("*.md")) if page.stem != "index"]


def repository_of(urls) -> str:
    """The address that pyproject.toml calls Repository, or nothing while there is none."""
    named = dict(url.split(", ", 1) for url in urls or [])
    return named.get("Repository", "").rstrip("/")


REPOSITORY = repository_of(importlib.metadata.metadata("halfstep").get_all("Project-URL"))


def as_ipynb(text: str, repository: str) -> str:
    """The notebook as it is opened outside of these pages: links lead to the repository, or become their text."""
    notebook = read_myst_markdown_notebook(text)
    notebook.metadata.pop("jupytext")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # At random they would differ from build to build.
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(lambda match: outside(match, repository), cell.source)
    return nbformat.writes(notebook) + "\n"


def outside(match: re.Match, repository: str) -> str:
    said, path, anchor = match.groups(default="")
    if not repository:
        return said
    page = os.path.relpath((FOLDER / path).resolve(), ROOT)
    return f"[{said}]({repository}/blob/main/{page}{anchor})"


def links_to(name: str, repository: str) -> str:
    """The line below the title of a notebook's page."""
    download = f'<a href="{name}.ipynb" download>Download this notebook</a>'
    if not repository:
        return download
    place = f"{repository.removeprefix('https://')}/blob/main/docs/notebooks/{name}.ipynb"
    return f"[Open in Colab](https://colab.research.google.com/{place.replace('github.com', 'github')}) · {download}"


def write(app):
    for source in notebooks():
        text = as_ipynb(source.read_text(encoding="utf-8"), REPOSITORY)
        target = pathlib.Path(app.outdir, "notebooks", f"{source.stem}.ipynb")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        # Colab opens what is in a repository on GitHub, and no other address.
        kept = source.with_suffix(".ipynb")
        if REPOSITORY and (not kept.exists() or kept.read_text(encoding="utf-8") != text):
            kept.write_text(text, encoding="utf-8")
            LOGGER.warning("%s has changed: commit it, since Colab opens it from the repository", kept)


def execute(app):
    """Executes at once, a notebook on each core; a page then finds its results. One that fails is told by its page."""
    cache = get_cache(app.config.nb_execution_cache_path)
    for source in notebooks():
        cache.add_nb_to_project(str(source), read_data={"type": "plugin", "name": "myst_nb_md"})
    # Whoever builds may have a profile of their own, whose start files could change what is printed.
    profile = pathlib.Path(app.outdir).parent / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_kernel_config.json").write_text('{"IPKernelApp": {"log_level": "ERROR"}}')
    os.environ["IPYTHONDIR"] = str(profile.parent)
    for name in ("notebooks", "traitlets"):
        python_logging.getLogger(name).setLevel("WARNING")
    executor = load_executor("temp-parallel", cache, python_logging.getLogger("notebooks"))
    executor.run_and_cache(timeout=app.config.nb_execution_timeout)


def add_links(app, name, source):
    if name in {f"notebooks/{page.stem}" for page in notebooks()}:
        links = links_to(name.removeprefix("notebooks/"), REPOSITORY)
        source[0] = re.sub(r"^# .*$", lambda title: f"{title[0]}\n\n{links}", source[0], count=1, flags=re.MULTILINE)


def keep_results(app, config):
    """Results are kept until a notebook's code changes, which myst-nb sees, or one of the packages."""
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        digest.update(path.read_bytes())
    config.nb_execution_cache_path = str(pathlib.Path(app.outdir).parent / f"executed-{digest.hexdigest()[:16]}")


def setup(app):
    app.setup_extension("myst_nb")
    app.connect("config-inited", keep_results)
    app.connect("builder-inited", write)
    app.connect("builder-inited", execute)
    app.connect("source-read", add_links)
    return {"parallel_read_safe": True}
