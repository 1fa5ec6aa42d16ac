"""Guards figures as SVG: the same bytes for the same figure, colours of a dark page, and text that stays text."""

import re
import xml.etree.ElementTree

import pytest
from matplotlib.figure import Figure

from loops.support.drawing import as_source, save, svg_of
from loops.support.palette import BLUE, ON_DARK, YELLOW

EVIL = "<script>alert(1)</script> & co."


def figure():
    drawn = Figure((3, 2))
    axes = drawn.subplots()
    axes.plot([1, 2], [1.23456, 2], color=BLUE, label=EVIL)
    axes.plot([1, 2], [2, 1], color=YELLOW)
    axes.legend()
    return drawn


def test_each_colour_of_the_palette_has_one_on_a_dark_page():
    text = svg_of(figure())
    blue = BLUE.lower()
    assert f"stroke: {blue}; stroke: var(--on-{blue[1:]}, {blue})" in text
    assert f"--on-{blue[1:]}: {ON_DARK[BLUE].lower()};" in text
    assert f"stroke: {YELLOW.lower()};" in text
    assert f"var(--on-{YELLOW.lower()[1:]}" not in text
    # None is left that a dark page would not change.
    alone = re.findall(r"(fill|stroke): (#[0-9a-f]{6})(?!; \1: var)", text.split("</style>", 1)[1])
    assert {colour for _, colour in alone}.isdisjoint(light.lower() for light in ON_DARK)


def test_it_is_one_element_whose_text_is_text():
    text = svg_of(figure())
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert EVIL in "".join(root.itertext())
    assert not [one for one in root.iter() if one.tag.endswith("script")]


def test_the_same_figure_has_the_same_bytes():
    assert svg_of(figure()) == svg_of(figure())
    assert as_source(svg_of(figure())).startswith("data:image/svg+xml;base64,")


@pytest.mark.parametrize("name", ["a.svg", "a.SVG"])
def test_a_figure_that_is_saved_as_svg_is_one(tmp_path, name):
    save(figure(), tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8") == svg_of(figure())
