"""Guards the pages of the effects: they say what the numbers beside them say, and the command that makes them."""

import dataclasses
import json
import pathlib
import sys
import types

import numpy as np
import pytest

from benchmarks.effects import EXPERIMENTS, Experiment, choose, pages
from benchmarks.effects import __main__ as command
from benchmarks.effects import effect as effect_module
from benchmarks.effects.effect import Claim, Effect, Found, Line, Panel, curve, flat, spread, told
from benchmarks.effects.figure import effect_figure

DOCS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "effects"
NAMES = [preset.name for preset in EXPERIMENTS]
LARGEST_PICTURE = 125_000

LINE = Line("steps", (1.0, 2.0), (0.5, None), (0.25, None), (0.75, None))
SMALL = Effect(
    name="small",
    title="A small effect",
    question="Is there one?",
    published="None.",
    design="Nothing was run.",
    seeds=3,
    steps=10,
    beside=(("an effect", "none", "0.5"),),
    columns=("a", "b"),
    rows=(("1", "2"), ("3", "4")),
    claims=(Claim("it is there.", True), Claim("it is large.", False)),
    remarks="It is small.",
    panels=(
        Panel("one", "x", "y", (LINE, LINE), reference=(0.1, "a tenth"), bounds=((1.5, "small"),)),
        Panel("two", "", "y", (LINE,), ticks=("a", "b", "c")),
    ),
    measured={"a": [1.0, float("nan"), 2.0]},
)


def read(path):
    """The effect whose numbers a file holds."""
    values = json.loads(path.read_text(encoding="utf-8"))
    claims = [Claim(**claim) for claim in values["claims"]]
    panels = [Panel(**{**panel, "lines": [Line(**line) for line in panel["lines"]]}) for panel in values["panels"]]
    return Effect(**{**values, "claims": claims, "panels": panels})


@pytest.fixture
def stub(monkeypatch):
    """An effect that takes no time, in place of all others."""
    asked = []

    def run(seeds, steps):
        asked.append((seeds, steps))
        return dataclasses.replace(SMALL, seeds=seeds, steps=steps)

    monkeypatch.setattr("benchmarks.effects.EXPERIMENTS", (Experiment("small", "nothing", 20, run),))
    monkeypatch.setattr(command, "EXPERIMENTS", (Experiment("small", "nothing", 20, run),))
    return asked


def run(capsys, *arguments):
    status = command.main(list(map(str, arguments)))
    return status, *capsys.readouterr()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_its_numbers_say(name):
    effect = read(DOCS / f"{name}.json")
    assert (effect.name, effect.steps) == (name, choose(name).steps)
    assert effect.seeds >= 3
    assert 0 < effect.seconds < 600
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == pages.page(effect)
    figure, picture = effect_figure(effect), (DOCS / f"{name}.svg").read_text(encoding="utf-8")
    assert len(figure.axes) == len(effect.panels)
    width, height = 72 * figure.get_size_inches()
    assert f'viewBox="0 0 {width:g} {height:g}"' in picture, "python -m benchmarks.effects draws it anew"
    assert len(picture) < LARGEST_PICTURE


def test_at_most_two_panels_are_in_a_row_and_curves_that_lie_on_each_other_are_told_apart():
    panel = SMALL.panels[0]
    figure = effect_figure(dataclasses.replace(SMALL, panels=(panel,) * 3))
    assert (
        figure.get_size_inches()[0] == effect_figure(dataclasses.replace(SMALL, panels=(panel,))).get_size_inches()[0]
    )
    assert len({axes.get_position().x0 for axes in figure.axes}) == 2
    below, above = (line for line in figure.axes[0].get_lines() if line.get_label() == LINE.label)
    assert below.get_linewidth() > above.get_linewidth()


def test_there_is_a_page_for_each_effect_and_an_index():
    assert {path.name for path in DOCS.iterdir()} == {
        "README.md",
        *(f"{name}.{ending}" for name in NAMES for ending in ("md", "json", "svg")),
    }
    index = pages.index([read(DOCS / f"{name}.json") for name in NAMES])
    assert (DOCS / "README.md").read_text(encoding="utf-8") == index


def test_every_part_of_an_effect_is_on_its_page():
    page = pages.page(SMALL)
    for part in (SMALL.title, SMALL.question, SMALL.published, SMALL.design, SMALL.remarks, "| 3 | 4 |", "| 0.5 |"):
        assert part in page
    assert "- Agrees: it is there." in page
    assert "- **Disagrees**: it is large." in page
    assert "`python -m benchmarks.effects small --seeds 3 --steps 10`" in page


def test_percent_is_in_the_heading_where_a_whole_column_has_it():
    rows = (("1 % (0–2)", "1 %", "1"), ("none", "2", ""))
    page = pages.page(dataclasses.replace(SMALL, columns=("a", "b", "c"), rows=rows))
    assert "| a, % | b | c |\n|---|---|---|\n| 1 (0–2) | 1 % | 1 |\n| none | 2 |  |" in page


def test_what_nobody_published_agrees_with_nothing_and_what_cannot_be_told_is_not_counted():
    claims = [Claim("one", True), Claim("two", None), Claim("three", False, published=False), Claim("four", False)]
    effect = dataclasses.replace(SMALL, claims=(*claims, Claim("five", True, published=False)))
    page = pages.page(effect)
    assert "- Agrees: one\n- Cannot tell: two\n- **Ours, refuted**: three\n" in page
    assert "- **Disagrees**: four\n- Ours: five\n" in page
    assert "| 1 of 2, 1 cannot be told |" in pages.index([effect])
    assert "| 1 cannot be told |" in pages.index([dataclasses.replace(SMALL, claims=claims[1:3])])
    assert json.loads(pages.as_json(effect))["claims"] == [dataclasses.asdict(claim) for claim in effect.claims]


def test_a_bound_is_drawn_with_its_label():
    axes = effect_figure(SMALL).axes
    assert [text.get_text() for text in axes[0].texts] == ["small"]
    assert not axes[1].texts
    assert [1.5, 1.5] in [list(line.get_xdata()) for line in axes[0].lines]


def test_a_curve_leaves_out_what_is_not_finite():
    found = curve("a", [1, 2], [[1.0, 3.0], [float("nan"), 1.0]])
    assert (found.y, found.low, found.high) == ((2.0, None), (1.0, None), (3.0, None))


def test_a_unit_is_said_once_and_no_dash_is_beside_a_sign():
    assert spread([1.0, 2.0, 3.0], ".1f") == "2.0 (1.0–3.0)"
    assert spread([1.0, 2.0, 3.0], ".1f", " %") == "2.0 % (1.0–3.0)"
    assert [spread([2.0, 2.0]), spread([2.0, 2.0], unit=" %")] == ["2", "2 %"]
    assert spread([-1.0, 1.0], "+.1f", " %") == "+0.0 % (-1.0 to +1.0)"


FOUND = Found(
    words={"half": np.array([0.25, 0.75]), "steps_done": 3, "ends": (0.5, 1.5), "names": ["a", "b"]},
    rows=[("one", np.array([0.25, 0.75]), 2.0)],
    holds={"first": np.array([True, True]), "second": np.array([True, False]), "third": None},
    lines=[(LINE,), (LINE, LINE)],
    measured={"half": [0.25, 0.75]},
)
TEXT = """
title = "Small"
question = '''
Is {half:.0f%} half,
or {_PARTS}?

Yes.
'''
published = "{steps} steps"
design = "{half}"
remarks = ""
beside = [["{steps_done} of {steps}", "none", "{half:.2f}"]]
columns = {a = "", b = ".0f%", "c {seeds}" = ".1f"}
panels = [
    {title = "p", x_label = "x", y_label = "y", log_x = 10, reference = ["half", "mean"], ticks = "names"},
    {title = "q", x_label = "", y_label = "two\\nlines", bounds = [[0.0, "to {steps}"]]},
]
[claims]
first.published = "it is {half:.1f}."
second.ours = "always."
third.published = "perhaps."
"""


@pytest.fixture
def small_text(monkeypatch):
    """The text of an effect that is no file, with a module that has a constant."""
    monkeypatch.setattr(effect_module, "written", lambda name: effect_module.tomllib.loads(TEXT))
    monkeypatch.setitem(sys.modules, "benchmarks.effects.a_small", types.SimpleNamespace(_PARTS=2))


def test_an_effect_is_its_text_with_the_numbers_of_a_run(small_text):
    effect = told("a-small", 2, 10, FOUND)
    assert (effect.name, effect.title, effect.seeds, effect.steps) == ("a-small", "Small", 2, 10)
    assert effect.question == "Is 50 % (25–75) half, or 2?\n\nYes."
    assert (effect.published, effect.design) == ("10 steps", "0.5 (0.25–0.75)")
    assert effect.beside == (("3 of 10", "none", "0.50 (0.25–0.75)"),)
    assert (effect.columns, effect.rows) == (("a", "b", "c 2"), (("one", "50 % (25–75)", "2.0"),))
    assert effect.claims == (
        Claim("it is 0.5 (0.2–0.8).", True),
        Claim("always.", False, published=False),
        Claim("perhaps.", None),
    )
    one, two = effect.panels
    assert (one.title, one.log_x, one.log_y, one.reference) == ("p", 10, 0, (0.5, "mean"))
    assert (one.ticks, one.bounds, one.lines) == (("a", "b"), (), (LINE,))
    assert (two.y_label, two.reference, two.bounds) == ("two\nlines", None, ((0.0, "to 10"),))


def test_a_claim_without_a_verdict_and_a_verdict_without_a_claim_are_refused(small_text):
    for holds in ({"first": True, "second": True}, {**FOUND.holds, "fourth": True}):
        with pytest.raises(KeyError, match="claims without a text or a verdict"):
            told("a-small", 2, 10, FOUND._replace(holds=holds))


def test_numbers_are_named_after_their_place():
    values = np.arange(12).reshape(2, 3, 2)
    found = flat({"a": values}, ["x", "y"], (1, 2, 3))
    assert list(found) == ["a x 1", "a x 2", "a x 3", "a y 1", "a y 2", "a y 3"]
    assert found["a y 2"] == values[1, 1].tolist()
    assert flat({"a": {("b", 1): values[0]}, "c": values[1]}, "xyz")["a b 1 y"] == values[0, 1].tolist()
    assert flat({"a": values[0, 0]}) == {"a": [0, 1]}


def test_the_command_writes_a_page_and_json_is_its_file(capsys, tmp_path, stub):
    status, printed, _ = run(capsys, "small", "--out", tmp_path / "new")
    assert status == 0
    assert stub == [(3, 20)]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"small.md", "small.json", "small.svg"}
    assert "disagrees: it is large." in printed
    assert str(tmp_path / "new" / "small.md") in printed
    effect = read(tmp_path / "new" / "small.json")
    assert effect.seconds >= 0
    assert (tmp_path / "new" / "small.md").read_text() == pages.page(effect)
    status, printed, _ = run(capsys, "small", "--out", tmp_path, "--json")
    assert status == 0
    assert json.loads(printed) == json.loads((tmp_path / "small.json").read_text())
    assert json.loads(printed)["measured"] == {"a": [1.0, None, 2.0]}


def test_all_of_them_have_an_index(capsys, tmp_path, stub):
    status, printed, _ = run(capsys, "all", "--seeds", 4, "--steps", 30, "--out", tmp_path, "--json")
    assert status == 0
    assert stub == [(4, 30)]
    assert [effect["name"] for effect in json.loads(printed)] == ["small"]
    assert "[A small effect](small.md) | 1 of 2" in (tmp_path / "README.md").read_text()


def test_the_list_says_what_there_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, printed, _ = run(capsys, "list")
    assert status == 0
    assert [name for name in NAMES if name not in printed] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "expected one of underflow, "),
        (["lag", "--steps", 5], "expected an integer of at least 10"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(capsys, tmp_path, arguments, said):
    status, printed, errors = run(capsys, *arguments, "--out", tmp_path)
    assert (status, printed) == (1, "")
    assert errors.startswith("effects: effect ")
    assert said in errors
    assert errors.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(capsys, tmp_path, stub):
    (tmp_path / "file").touch()
    status, printed, errors = run(capsys, "small", "--out", tmp_path / "file" / "new")
    assert (status, printed, stub) == (1, "", [])
    assert "Choose a folder that can be written with --out." in errors


def test_without_matplotlib_nothing_runs(capsys, tmp_path, stub, monkeypatch):
    monkeypatch.delitem(sys.modules, "benchmarks.effects.figure")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, errors = run(capsys, "small", "--out", tmp_path)
    assert (status, stub) == (1, [])
    assert 'the figures need matplotlib: pip install "halfstep[study]"' in errors
