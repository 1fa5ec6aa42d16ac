"""Guards the picture of an explanation: each value has the place that says what it is, and none a wrong one."""

import dataclasses
import math

import pytest

import loops
from loops.diagnose.explain.explanation import Explanation, Magnitude, magnitudes_figure, picture

ROWS = (
    Magnitude("first", 2.0**3, 2.0**-20, "float16"),
    Magnitude("dead", 0.0, 0.0, "float16"),
    Magnitude("attention", math.inf, math.nan, "float16"),
    Magnitude("head", 2.0**40, None, "float32"),
)


def explanation(rows, verdict="overflow"):
    required = {
        field.name: None
        for field in dataclasses.fields(Explanation)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    found = {"step": 3, "verdict": verdict, "layer": "attention", "magnitudes": rows}
    return Explanation(**{**required, **found})


def places(axes):
    """What is marked in a panel: the places, and the rows."""
    return sorted((float(line.get_xdata()[0]), round(float(line.get_ydata()[0]))) for line in axes.get_lines())


def test_zero_and_what_is_not_finite_lie_outside_of_the_axis():
    zero, axes, lost = magnitudes_figure(explanation(ROWS)).axes
    assert places(zero) == [(0.0, 1), (0.0, 1)]
    assert places(axes) == [(-20.0, 0), (3.0, 0), (40.0, 3)]
    assert places(lost) == [(0.0, 2), (1.0, 2)]
    assert [label.get_text() for label in lost.get_xticklabels()] == ["∞", "NaN"]
    low, high = axes.get_xlim()
    assert low < -24
    assert high > 40


def test_gradients_of_a_loss_that_is_not_finite_are_left_out():
    zero, axes, lost = magnitudes_figure(explanation(ROWS, "loss")).axes
    assert (places(zero), places(axes), places(lost)) == ([(0.0, 1)], [(3.0, 0), (40.0, 3)], [(0.0, 2)])


def test_the_layer_where_it_began_is_marked_and_areas_are_named():
    figure = magnitudes_figure(explanation(ROWS))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["first", "dead", "▶ attention", "head"]
    (legend,) = figure.legends
    said = [text.get_text().partition(" (")[0] for text in legend.get_texts()]
    assert said == ["output", "gradients, scaled", "becomes zero", "subnormal", "becomes infinite"]


def test_it_is_written_as_svg_for_light_and_dark_pages(tmp_path):
    picture(explanation(ROWS), tmp_path / "a.svg")
    assert "prefers-color-scheme: dark" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_without_magnitudes_nothing_is_drawn():
    with pytest.raises(loops.LoopError, match="nothing to draw"):
        magnitudes_figure(explanation(()))
