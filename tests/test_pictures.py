"""The pictures of `docs/concepts/` come from the script beside them, and show what is said; the gallery has all."""

import os
import pathlib
import re
import runpy

import numpy as np
import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
CONCEPTS = DOCS / "concepts"
LARGEST = 60_000  # Bytes.
SIZE = re.compile(r"viewBox=\S+ \S+ \S+ \S+")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(CONCEPTS / "pictures.py"))


def test_each_picture_is_on_its_page_and_small(script):
    assert {path.stem for path in CONCEPTS.glob("*.svg")} == set(script["DRAWN"])
    for name in script["DRAWN"]:
        assert f"]({name}.svg)" in (CONCEPTS / f"{name}.md").read_text(encoding="utf-8")
        assert (CONCEPTS / f"{name}.svg").stat().st_size < LARGEST


def test_the_gallery_shows_each_picture_of_the_pages_once():
    shown = re.findall(r"^!\[.+\]\((.+)\)$", (DOCS / "gallery.md").read_text(encoding="utf-8"), re.MULTILINE)
    effects = DOCS.parent / "benchmarks" / "results" / "effects"
    pictures = [path for path in (*DOCS.rglob("*.png"), *DOCS.rglob("*.svg")) if "_build" not in path.parts]
    assert sorted(shown) == sorted(os.path.relpath(path, DOCS) for path in (*pictures, *effects.glob("*.svg")))


@pytest.mark.parametrize("name", ["formats", "masters"])
def test_a_picture_is_drawn_again(script, tmp_path, name):
    new, old = script["write"](name, tmp_path), CONCEPTS / f"{name}.svg"
    assert re.search(SIZE, new.read_text(encoding="utf-8"))[0] == re.search(SIZE, old.read_text(encoding="utf-8"))[0]


def test_each_step_at_the_highest_scale_is_skipped(script):
    scales, values, skipped = script["course"]()
    assert skipped.sum() == 3
    np.testing.assert_array_equal(skipped, scales == 2.0**15)
    moves = np.diff(values)
    np.testing.assert_array_equal(moves == 0, skipped[1:])


@pytest.mark.slow
def test_the_gradients_are_where_the_page_says(script):
    """What becomes zero at a scale of 1, and infinite at 2^40, of `concepts/scaling.md`."""
    found = script["digits_gradients"]()
    assert np.mean(found <= -25) == pytest.approx(0.59, abs=0.05)
    assert np.mean((found + 15 > -25) & (found + 15 < 16)) > 0.995
    assert np.mean(found + 40 >= np.log2(65520)) == pytest.approx(0.26, abs=0.05)
