"""Guards figures as SVG: the same bytes for the same figure, colours of a dark page, and text that stays text."""

import pathlib
import re
import sys
import xml.etree.ElementTree

import pytest
from matplotlib.figure import Figure

import halfstep as cli
import loops
from loops.support.drawing import as_source, save, svg_of
from loops.support.palette import BLUE, DARK_PAGE, LIGHT_PAGE, ON_DARK, SERIES, TEXT, YELLOW

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


MISSING = 'halfstep: the figures need matplotlib: pip install "halfstep[study]"\n'


@pytest.mark.parametrize("asked", [["lab", "study"], ["doctor", "--model", "x:y", "--out", "a.png"]])
def test_without_matplotlib_a_command_says_so_before_it_runs(capsys, monkeypatch, tmp_path, asked):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(asked) == 1
    assert capsys.readouterr() == ("", MISSING)


@pytest.mark.parametrize("name", ["no/such.png", "figure.docx"])
def test_a_figure_that_cannot_be_written_is_one_sentence(tmp_path, name):
    with pytest.raises(loops.NotWritable, match=r"the figure cannot be written .*Name a \.png, \.svg or \.pdf\."):
        save(Figure(), tmp_path / name)


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


def test_lines_of_a_figure_differ_on_each_page_and_can_be_seen():
    assert len(set(SERIES)) == len(SERIES) == 6
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
