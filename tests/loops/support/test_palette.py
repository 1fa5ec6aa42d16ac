"""Guards the one palette: what a page shows can be seen in light and in dark, and no file has its own colours."""

import pathlib
import re

import pytest

import loops
from loops.support.palette import DARK_PAGE, LIGHT_PAGE, ON_DARK, SERIES, TEXT

LOOPS = pathlib.Path(loops.__file__).parent
COLOUR = re.compile(r"[\"'(: ]#(?:[0-9A-Fa-f]{3}){1,2}\b")


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """As WCAG counts it, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", [LIGHT_PAGE, DARK_PAGE], ids=["light", "dark"])
def test_lines_and_words_of_a_page_can_be_seen(page):
    assert set(page) == set(LIGHT_PAGE)
    for ground in (page["page"], page["card"]):
        assert min(contrast(page[name], ground) for name in ("text", "soft")) >= 4.5
        assert min(contrast(page[name], page["page"]) for name in ("blue", "red", "green", "pink", "orange")) >= 3


def test_lines_of_a_figure_differ():
    assert len(set(SERIES)) == len(SERIES) == 6


def test_lines_of_a_figure_differ_on_a_dark_page_and_can_be_seen():
    dark = [ON_DARK[colour] for colour in (*SERIES, TEXT)]
    assert len(set(dark)) == 7
    assert min(contrast(colour, ON_DARK["#FFFFFF"]) for colour in dark) >= 3


def test_no_file_has_colours_of_its_own():
    found = [
        path.relative_to(LOOPS).as_posix()
        for ending in ("py", "css", "js", "html")
        for path in LOOPS.rglob(f"*.{ending}")
        if COLOUR.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["support/palette.py"]
