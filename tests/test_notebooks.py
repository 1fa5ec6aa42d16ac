"""`docs/notebooks/`: their form, and the files that people open. `make docs` executes them."""

import ast
import json
import pathlib
import re
import runpy
import types

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
NOTEBOOKS = [page for page in sorted((DOCS / "notebooks").glob("*.md")) if page.stem != "index"]
ADDRESS = "https://github.com/someone/halfstep"
each = pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)


def cells(page):
    return re.findall(r"^```\{code-cell\} ipython3\n(?:---\n.*?^---\n)?(.*?)^```", page.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def extension():
    pytest.importorskip("myst_nb")
    return runpy.run_path(str(DOCS / "_extensions" / "notebooks.py"))


@each
def test_a_notebook_installs_first_and_its_cells_are_python(page):
    first, *rest = cells(page)
    assert re.search(
        r'find_spec\("halfstep"\) is None:\n    %pip install --quiet "halfstep\[study(,trace)?\]"\n$', first
    )
    assert len(rest) >= 4
    for cell in [one for one in rest if not one.startswith("%%bash")]:
        ast.parse(re.sub(r"^%.*$", "", cell, flags=re.M))


@each
def test_a_notebook_has_its_row_and_its_place(page):
    assert f"]({page.name})" in (DOCS / "notebooks" / "index.md").read_text()
    assert f"\nnotebooks/{page.stem}\n" in (DOCS / "index.md").read_text()


@each
def test_a_picture_is_described(page):
    """The cells that end in one."""
    drawing = re.findall(
        r"^```\{code-cell\} ipython3\n((?:(?!^```).*\n)*?)(?:figure|plots\..*|Image\(.*)\n```", page.read_text(), re.M
    )
    assert all("    alt: " in cell for cell in drawing)
    assert len(drawing) == len(re.findall(r"^    alt: ", page.read_text(), re.M))


@each
@pytest.mark.parametrize("repository", ["", ADDRESS])
def test_the_file_has_the_same_cells_and_no_link_that_fails(extension, page, repository):
    text = extension["as_ipynb"](page.read_text(), repository)
    assert text == extension["as_ipynb"](page.read_text(), repository)
    notebook = json.loads(text)
    assert ["".join(cell["source"]) + "\n" for cell in notebook["cells"] if cell["cell_type"] == "code"] == cells(page)
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    said = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    places = re.findall(r"\]\(([^)#]+)", said)
    root = DOCS.parent
    assert bool(places) == bool(repository)
    assert all((root / place.removeprefix(f"{ADDRESS}/blob/main/")).is_file() for place in places)


def test_a_page_links_to_colab_where_the_repository_is_known(extension):
    links = extension["links_to"]
    colab = "https://colab.research.google.com/github/someone/halfstep/blob/main/docs/notebooks/gpu.ipynb"
    assert "colab" not in links("gpu", "")
    assert f"[Open in Colab]({colab})" in links("gpu", ADDRESS)
    assert '<a href="gpu.ipynb" download>' in links("gpu", "")
    assert extension["repository_of"](["Documentation, https://a.b", f"Repository, {ADDRESS}/"]) == ADDRESS
    assert extension["repository_of"](None) == ""


def test_files_for_colab_are_asked_for_once(extension, tmp_path, monkeypatch):
    """It opens what is in a repository, so they have to be there, and only where the address is known."""
    page = tmp_path / "one.md"
    page.write_text(NOTEBOOKS[0].read_text())
    said = []
    names = extension["write"].__globals__
    monkeypatch.setitem(names, "FOLDER", tmp_path)
    monkeypatch.setitem(names, "LOGGER", types.SimpleNamespace(warning=lambda *words: said.append(words)))
    site = types.SimpleNamespace(outdir=tmp_path / "html")
    for repository, asked in (("", 0), (ADDRESS, 1), (ADDRESS, 1)):
        monkeypatch.setitem(names, "REPOSITORY", repository)
        extension["write"](site)
        assert len(said) == asked
        assert page.with_suffix(".ipynb").exists() == bool(repository)
    made = (tmp_path / "html" / "notebooks" / "one.ipynb").read_text()
    assert page.with_suffix(".ipynb").read_text() == made
