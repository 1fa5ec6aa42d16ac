"""Guards the figures of a study: each set-up has a look of its own, the same everywhere, and is in every figure."""

import itertools
import pathlib
import re
import xml.etree.ElementTree

import matplotlib.colors
import pytest
from test_study_report import DYNAMIC, FLOAT32, NONE, SMALL_DYNAMIC, figures_of, write_study

from loops.study.figures import comparison_figure, gradients_figure, loss_figure, loss_scale_figure, small_loss_figure
from loops.study.setups import SETUPS, Setup, marks
from loops.support.drawing import svg_of
from loops.support.text import share

CONSTANT, MOVING = (
    [Setup(f"{kind}-{n}", f"{kind}:{n}$", "mixed_float16", f"{kind}:{n}") for n in numbers]
    for kind, numbers in (("static", (1, 2, 4, 8)), ("dynamic", (16, 32, 64)))
)
STRATEGIES = [*CONSTANT, *MOVING]
DOCS = pathlib.Path(__file__).parents[3] / "docs"
# Okabe and Ito's, but for yellow.
PALETTE = {"#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"}


@pytest.fixture(scope="module")
def strategies(tmp_path_factory):
    folder = write_study(tmp_path_factory.mktemp("strategies"), [FLOAT32, *STRATEGIES], broken={("static-8", 1): 7})
    return figures_of(folder)


def panels(figure):
    """The panels that stand for a set-up, by its title."""
    return {axes.get_legend().get_texts()[0].get_text(): axes for axes in figure.axes if axes.get_legend()}


def look(line):
    return matplotlib.colors.to_hex(line.get_color()), line.get_linestyle(), line.get_marker()


def test_no_two_strategies_look_alike_and_none_looks_like_float32():
    rows = [{"name": "float32"}, *({"name": f"strategy-{n}"} for n in range(84))]
    found = marks({"setups": rows})
    assert len(set(found.values())) == 85
    assert {mark.colour for name, mark in found.items() if name != "float32"} == PALETTE
    assert found["float32"].colour == "#000000"
    for one, other in itertools.pairwise(list(found.values())[1:]):
        assert all(a != b for a, b in zip(one, other, strict=True))


def test_the_set_ups_of_the_study_look_different_and_small_ones_like_their_twins():
    found = marks({"setups": [{"name": setup.name} for setup in SETUPS]})
    assert len(set(found.values())) == len(SETUPS)
    for name in ("float32", "mixed-none", "mixed-dynamic"):
        twin, small = found[name], found[f"small-{name}"]
        assert (twin.colour, twin.marker) == (small.colour, small.marker)
        assert twin.dashes != small.dashes


@pytest.mark.parametrize("draw", [loss_figure, loss_scale_figure])
def test_the_line_in_a_panel_is_that_of_its_legend(strategies, draw):
    summary, steps = strategies
    found = marks(summary)
    drawn = panels(draw(summary, steps))
    without = {"float32", *(setup.title for setup in CONSTANT)} if draw is loss_scale_figure else set()
    assert set(drawn) == {row["title"] for row in summary["setups"]} - without
    for row in summary["setups"]:
        if row["title"] in drawn:
            axes = drawn[row["title"]]
            (sample,) = axes.get_legend().get_lines()
            curves = [line for line in axes.get_lines() if line.get_marker() not in ("x", "None")]
            assert {look(line) for line in curves} == {look(sample)}
            assert look(sample)[0].upper() == found[row["name"]].colour


def test_no_constant_scale_is_drawn_alone(tmp_path):
    found = figures_of(write_study(tmp_path, [FLOAT32, *CONSTANT]))
    assert loss_scale_figure(*found) is None
    assert len(comparison_figure(*found).axes) == 3


def test_runs_that_lie_on_each_other_are_told_apart(tmp_path):
    (axes,) = loss_scale_figure(*figures_of(write_study(tmp_path / "alone", [DYNAMIC], seeds=1))).axes
    assert [(line.get_linewidth(), line.get_alpha()) for line in axes.get_lines()] == [(1.4, 1)]
    (axes,) = loss_scale_figure(*figures_of(write_study(tmp_path, [DYNAMIC], seeds=3))).axes
    looks = [(line.get_linewidth(), line.get_alpha()) for line in axes.get_lines()]
    (wide, pale), (middle, between), (thin, dark) = looks
    assert wide > 1.5 * middle > 2 * thin
    assert pale < between < dark == 1


def labels(svg):
    """The words of a picture without its figures, which another study has otherwise; and its width."""
    texts = xml.etree.ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    words = {re.sub(r"[^A-Za-z ]+", "", "".join(text.itertext())).strip() for text in texts}
    return words - {""}, re.search(r'<svg [^>]*width="([^"]+)"', svg)[1]


def test_the_picture_of_the_first_page_is_what_a_study_draws(tmp_path):
    """`make pictures` draws it anew."""
    figure = small_loss_figure(*figures_of(write_study(tmp_path, SETUPS[-3:], seeds=3)))
    assert labels((DOCS / "small_loss.svg").read_text(encoding="utf-8")) == labels(svg_of(figure))


def test_the_picture_of_the_strategies_is_what_a_study_draws(tmp_path):
    names = re.findall(r"--strategy (\S+)", (DOCS / "strategies.md").read_text().partition("--out eight")[2])
    setups = [Setup(f"{n}", name, "mixed_float16", "dynamic") for n, name in enumerate(names[1:8])]
    figure = loss_scale_figure(*figures_of(write_study(tmp_path, setups, seeds=1)))
    assert labels((DOCS / "strategies.svg").read_text(encoding="utf-8")) == labels(svg_of(figure))


def test_every_strategy_has_its_histograms(strategies):
    summary, _ = strategies
    figure = gradients_figure(summary)
    assert [title for title in panels(figure) if title] == [setup.title for setup in STRATEGIES]
    assert len(figure.axes) == 2 * len(STRATEGIES)


def test_one_figure_compares_all(strategies):
    summary, steps = strategies
    figure = comparison_figure(summary, steps)
    accuracy, flushed, skips, scales = figure.axes
    assert [label.get_text() for label in accuracy.get_yticklabels()] == [row["title"] for row in summary["setups"]]
    assert [axes.get_title(loc="left") for axes in (accuracy, flushed, skips)] == [
        "accuracy",
        "gradients made zero",
        "skipped steps",
    ]
    said = [text.get_text() for text in accuracy.texts]
    assert said == ["98.6%", *["90.1%"] * 3, "90.0%, 1 failed", *["90.1%"] * 3]
    assert [text.get_text() for text in flushed.texts] == ["8.5%"] * len(STRATEGIES)
    assert len(scales.get_lines()) == len(STRATEGIES)
    found = marks(summary)
    assert [look(line)[0].upper() for line in scales.get_lines()] == [found[s.name].colour for s in STRATEGIES]


@pytest.mark.parametrize("setups", [[FLOAT32], [FLOAT32, NONE, SMALL_DYNAMIC]], ids=["one", "small"])
def test_any_study_can_be_compared(tmp_path, setups):
    figure = comparison_figure(*figures_of(write_study(tmp_path, setups)))
    assert len(figure.axes[0].get_yticklabels()) == len(setups)


def test_shares_are_percentages_of_two_digits():
    small, large = (0, 0.0, 3e-8, 1e-5, 3e-5, 1.234e-4, 0.00214), (0.0849, 0.6449, 0.9949, 0.9968, 0.9991, 1)
    assert [*map(share, small)] == ["0%", "0%", "<0.001%", "0.001%", "0.003%", "0.012%", "0.21%"]
    assert [*map(share, large)] == ["8.5%", "64%", "99%", "99.7%", ">99.9%", "100%"]
