"""What an explanation says, word by word: the other tests ask what it found. One case for each sentence."""

import math

import pytest

import loops
from loops.diagnose.explain.explanation import (
    Explanation,
    Growth,
    Label,
    Magnitude,
    describe,
    magnitudes_figure,
    picture,
)
from loops.diagnose.explain.remedies import Kind, Remedy
from loops.diagnose.graph.literals import Literal


def remedy(kind, name, finite=True, why_not=None):
    helps = finite and why_not is None
    return Remedy(kind, name, True, finite, 1.0, f"Advice for {name}.", helps=helps, why_not=why_not)


BEGAN = {
    "where": "forward",
    "layer": "a",
    "tensor": "a/Mul:0",
    "operation": "Mul",
    "line": "program.py:7",
    "kind": "inf",
}
DATA = {**BEGAN, "where": "data", "layer": None, "operation": "Placeholder", "kind": "nan", "example": 2}
WEIGHTS = {**BEGAN, "where": "weights", "blame": "weights"}
WIDE, CLIPPED = remedy(Kind.ALL_IN_FLOAT32, "every layer in float32"), remedy(Kind.EXPONENT_CLIPPED, "inputs clipped")
PASSES, FAILS = (remedy(Kind.ANOTHER_BATCH, "another batch", finite=finite) for finite in (True, False))
NO_HELP = remedy(Kind.LOSS_SCALE, "loss scale 0.5", why_not="it leaves 1% of the gradients")
GROWTH = {
    "loss": Growth(3, 4e5, 1e6, 1.0),
    "of_no_rate": Growth(3, 4.0, None, 1.0),
    "of_weights": Growth(None, None, 1e6, 2e5),
}
COLUMNS = tuple((0, column) for column in range(5))

# By what is said: the verdict, and what was found.
SAID = {
    "applied": ("healthy", {"applied": True}),
    "applied, with a mask": ("healthy", {"applied": True, "masked": ("a:0", "b:0")}),
    "applied in the replay alone": ("healthy", {"applied": True, "finite_again": True}),
    "applied after a retry": ("healthy", {"applied": True, "retried": (2, 256.0)}),
    "not applied by the program": ("healthy", {}),
    "a micro-batch": ("healthy", {"attempted": False}),
    "zero squares": ("zero", {"nonzero": 5}),
    "zero at any scale": ("zero", {}),
    "zero, flushed": ("zero", {"nonzero": 5000, "nonzero_at": 2.0**20}),
    "an overflow": ("overflow", {**BEGAN, "where": "backward", "octaves_over": 3.2, "fits_at": 64.0}),
    "an overflow of two scalers": ("overflow", {"fits_at": 64.0, "other_scales": ((512.0, 8.0), (256.0, None))}),
    "an overflow at the floor": ("floor", {"where": "backward", "layer": "a", "inside": False, "fits_at": 64.0}),
    "no scale": ("backward", {**BEGAN, "where": "backward", "seen_at": 1.0, "remedies": (NO_HELP,)}),
    "no scale, flushed": ("backward", {**BEGAN, "where": "backward", "flushed_at": 0.25}),
    "too large": ("too_large", {}),
    "an update": ("update", {}),
    "an update with a reason": ("update", {"said": "the learning rate of SGD is NaN."}),
    "a spike": ("spike", {"spike": ("norm", 30.0, 4.0)}),
    "a spike of the loss": ("spike", {"spike": ("loss", 30.0, 4.0)}),
    "a spike of one gradient": ("spike", {"said": "the gradient of 'a' is far beyond the others."}),
    "a spike of an unknown kind": ("spike", {}),
    "a lost trail": ("loss", {**BEGAN, "where": None, "operation": "DecodeRaw", "kind": "nan"}),
    "nothing known": ("loss", {}),
    "a layer": ("loss", {**BEGAN, "remedies": (WIDE, CLIPPED)}),
    "one remedy that is no help": ("loss", {**BEGAN, "remedies": (NO_HELP, CLIPPED)}),
    "one example": ("loss", {**BEGAN, "example": 1}),
    "the loss": ("loss", {**BEGAN, "layer": None}),
    "the loss behind a layer": ("loss", {**BEGAN, "inside": False}),
    "a regularizer": ("loss", {**BEGAN, "regularizer": True}),
    "the gradient of a regularizer": ("backward", {**BEGAN, "where": "backward", "regularizer": True, "inside": False}),
    "a custom gradient": ("backward", {**BEGAN, "where": "backward", "custom_gradient": "direction"}),
    "a constant": ("loss", {**BEGAN, "operation": "Const"}),
    "a constant of NaN": ("loss", {**BEGAN, "operation": "Const", "kind": "nan"}),
    "a literal": ("loss", {**BEGAN, "literals": (Literal("a/mul/y", -1e9, -math.inf, False),)}),
    "an observer": ("loss", {**BEGAN, "observed_alike": False}),
    "an applied loss": ("loss", {**BEGAN, "applied": True}),
    "a loss at any scale": ("loss", {**BEGAN, "applied_at": 64.0}),
    "the batch": ("loss", {**DATA, "blame": "batch"}),
    "the batch, another passes": ("loss", {**DATA, "blame": "batch", "remedies": (PASSES,)}),
    "the batch, also in float32": ("loss", {**DATA, "blame": "batch", "remedies": (WIDE, PASSES)}),
    "the batch and another": ("loss", {**DATA, "blame": "batch", "remedies": (FAILS,), "other_batch": "previous"}),
    "the batch, after a cast": ("loss", {**DATA, "operation": "Cast", "kind": "inf"}),
    "the dataset": ("loss", {**DATA, "blame": "dataset", "columns": (("x", 3),)}),
    "a part of the batch": ("loss", {**DATA, "columns": ((0, None),)}),
    "many columns": ("loss", {**DATA, "columns": COLUMNS}),
    "an empty batch": ("loss", {**BEGAN, "kind": "nan", "empty": True}),
    "a label": ("loss", {**DATA, "label": Label(10, 10)}),
    "a weight": ("loss", {**WEIGHTS, "operation": "ReadVariableOp"}),
    "a weight after a cast": ("loss", WEIGHTS),
    "a weight from the start": ("loss", {**WEIGHTS, "lost_weight": ("a/kernel", 0)}),
    "a weight that was lost": ("loss", {**WEIGHTS, "lost_weight": ("a/kernel", 20)}),
    "large updates": ("loss", {**WEIGHTS, "grown_through": "learning rate"}),
    "weight decay": ("loss", {**WEIGHTS, "grown_through": "weight decay"}),
    "a schedule": ("loss", {**WEIGHTS, "learning_rates": (0.01, 1e4)}),
    "a rate that is NaN": ("update", {"learning_rates": (math.nan, math.nan)}),
    "an update before": ("loss", {**WEIGHTS, "growth": GROWTH["loss"]}),
    "an update before, of no rate": ("loss", {**WEIGHTS, "growth": GROWTH["of_no_rate"]}),
    "the largest weight": ("loss", {**WEIGHTS, "growth": GROWTH["of_weights"]}),
    "one replica": ("loss", {**BEGAN, "replicas": (1,)}),
    "several replicas": ("loss", {**BEGAN, "replicas": (0, 2)}),
    "no replica alone": ("loss", {**BEGAN, "replicas": ()}),
    "a replay that differs": ("loss", {"reproduced": False, "differs": "Loss of step 1 was 7."}),
    "a replay without a log": ("loss", {"reproduced": False, "differs": "There is no log.", "comparable": False}),
}


def test_sentences(snapshot):
    known = {"step": 5, "reproduced": True, "differs": None, "loss_scale": 1024.0}
    said = {name: describe(Explanation(verdict=verdict, **known | found)) for name, (verdict, found) in SAID.items()}
    assert said == snapshot


ROWS = (
    Magnitude("first", 2.0**3, 2.0**-20, "float16"),
    Magnitude("dead", 0.0, 0.0, "float16"),
    Magnitude("attention", math.inf, math.nan, "float16"),
    Magnitude("head", 2.0**40, None, "float32"),
)


def explanation(rows, verdict="overflow"):
    return Explanation(3, True, None, verdict, layer="attention", magnitudes=rows)


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
