"""The figure of an effect: its curves, with the spread over seeds as a band."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.effects.effect import Effect, Line, Panel
from loops.support.drawing import STYLE
from loops.support.palette import SOFT, Mark, mark

_WIDTH, _HEIGHT = 8.0, 3.4
_FEW = 40
"""The most positions at which each has a marker."""
_SHIFT = 0.14
_WIDER = 0.3
"""What a curve is wider for each that is drawn over it, in points."""
_ROW, _MARK = 50, 5
"""The letters that a row of a legend has room for, and those that a mark and its gaps take."""


@matplotlib.rc_context(STYLE)
def effect_figure(effect: Effect) -> Figure:
    """The panels of an effect, two in a row: more would be too small to read on a phone.

    Args:
        effect: An effect with at least one panel.
    """
    columns = min(2, len(effect.panels))
    rows = -(-len(effect.panels) // columns)
    figure = Figure((_WIDTH, _HEIGHT * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(places, effect.panels, strict=False):
        _panel(axes, panel)
    for axes in places[len(effect.panels) :]:
        axes.remove()
    return figure


def _panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.log_x:
        axes.set_xscale("log", base=panel.log_x)
    if panel.log_y:
        axes.set_yscale("log", base=panel.log_y)
    for number, line in enumerate(panel.lines):
        if panel.ticks:
            _points(axes, line, mark(number), _SHIFT * (number - (len(panel.lines) - 1) / 2))
        else:
            _line(axes, line, mark(number), len(panel.lines) - 1 - number)
    if panel.reference is not None:
        height, said = panel.reference
        axes.axhline(height, color=SOFT, linewidth=1, linestyle=(0, (2, 2)), label=said)
    for position, said in panel.bounds:
        _bound(axes, position, said)
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=30, ha="right", rotation_mode="anchor")
    if panel.reference is not None or len(panel.lines) > 1:
        _legend(axes, above=bool(panel.ticks or panel.bounds))


def _bound(axes: Axes, position: float, said: str) -> None:
    """Draws a vertical line, with its label upright at its left."""
    axes.axvline(position, color=SOFT, linewidth=1, linestyle=(0, (2, 2)))
    look: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 7, "color": SOFT}
    axes.text(position, 0.98, said, transform=axes.get_xaxis_transform(), **look)


def _legend(axes: Axes, above: bool) -> None:
    """Draws the legend: inside the axes, or in rows below the title if points or labels leave no room inside."""
    if not above:
        axes.legend(fontsize=7.5, handlelength=2.6)
        return
    labels = axes.get_legend_handles_labels()[1]
    rows = 1 if sum(map(len, labels)) + _MARK * len(labels) <= _ROW else 2
    axes.set_title(axes.get_title("left"), loc="left", pad=5 + 13 * rows)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0.3}
    axes.legend(fontsize=7.5, handlelength=1.2, columnspacing=1.0, ncols=-(-len(labels) // rows), **place)


def _line(axes: Axes, line: Line, look: Mark, above: int) -> None:
    """Draws a curve, wider for each curve that comes after it: it can be seen where they lie on it."""
    x, y, low, high = _known(line)
    shown: dict[str, Any] = {"marker": look.marker, "markersize": 4} if len(x) <= _FEW else {}
    axes.plot(x, y, label=line.label, **{**look.line, "linewidth": 1.4 + _WIDER * above}, **shown)
    axes.fill_between(x, low, high, color=look.colour, alpha=0.2, linewidth=0)


def _points(axes: Axes, line: Line, look: Mark, shift: float) -> None:
    """Draws values of unordered things: no line joins them."""
    x, y, low, high = _known(line)
    axes.vlines(x + shift, low, high, color=look.colour, linewidth=1.2)
    axes.plot(x + shift, y, look.marker, color=look.colour, markersize=5, label=line.label)


def _known(line: Line) -> tuple[np.ndarray, ...]:
    at = [number for number, value in enumerate(line.y) if value is not None]
    return tuple(np.array(values, np.float64)[at] for values in (line.x, line.y, line.low, line.high))
