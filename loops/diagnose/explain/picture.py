"""Draws the largest magnitudes along the model, forward and backward, within the format's range."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import scaler
from loops.diagnose.explain.explanation import Explanation, Magnitude
from loops.support.drawing import drawing, save
from loops.support.errors import LoopError
from loops.support.palette import BLUE, RED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORWARD, _BACKWARD = (BLUE, "o", "output"), (RED, "s", "gradients, scaled")
_BESIDE = 0.16
"""How far the two marks of a layer are from its line."""


def picture(found: Explanation, path: str | os.PathLike) -> None:
    """Draws an explanation into a file, a PNG, SVG or PDF by its name.

    Raises:
        LoopError: If matplotlib is not installed, or there is nothing to draw.
        NotWritable: If the file cannot be written.
    """
    save(magnitudes_figure(found), path)


def magnitudes_figure(found: Explanation) -> Figure:
    """The picture as a matplotlib Figure: the axis of magnitudes between a panel for zero and one for what is none."""
    if not found.magnitudes:
        raise LoopError("no magnitudes of the model's layers are known, so there is nothing to draw.")
    rows = found.magnitudes
    with drawing(2.1 + 0.32 * len(rows)) as figure:
        from loops.support.plot_style import NARROW

        figure.set_figwidth(NARROW)
        # A zero has no logarithm, and what is not finite no place on an axis.
        zero, axes, lost = figure.subplots(1, 3, sharey=True, width_ratios=(0.08, 1.0, 0.24))
        _number_line(axes, rows)
        _outside(zero, ["0"])
        _outside(lost, ["∞", "NaN"])
        shown = [_FORWARD]
        _marks(zero, axes, lost, [row.forward for row in rows], -_BESIDE, *_FORWARD)
        if found.verdict != "loss":  # The gradients of a loss that is not finite tell nothing.
            shown.append(_BACKWARD)
            _marks(zero, axes, lost, [row.backward for row in rows], _BESIDE, *_BACKWARD)
        zero.set_yticks(range(len(rows)), [_label(row, found) for row in rows], parse_math=False)
        zero.set_ylim(len(rows) - 0.5, -0.5)
        _explain(figure, shown)
        began = f", began in {found.layer!r}" if found.layer else ""
        figure.suptitle(f"Step {found.step}: {found.verdict}{began}", x=0.01, ha="left", fontsize=10, parse_math=False)
        return figure


def _number_line(axes: Any, rows: Sequence[Magnitude]) -> None:
    """The axis of powers of two around the range of float16 and all values, with that range's ends."""
    from matplotlib.ticker import MaxNLocator

    from loops.support.plot_style import shade

    half = scaler.float_format("float16")
    values = [value for row in rows for value in (row.forward, row.backward) if value is not None]
    known = [math.log2(value) for value in values if _has_logarithm(value)]
    low = min([math.log2(half.smallest_subnormal) - 6, *(value - 2 for value in known)])
    high = max([math.log2(half.max) + 6, *(value + 2 for value in known)])
    shade(axes, low, high)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, place: f"$2^{{{value:.0f}}}$")
    axes.set_xlabel("largest magnitude in the layer")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=False)


def _outside(axes: Any, names: Sequence[str]) -> None:
    """A panel beside the axis, with a column for each name, in the colour of what float16 makes of a magnitude."""
    from loops.support.plot_style import INFINITE, ZERO, tint

    tint(axes, -0.5, len(names) - 0.5, ZERO if names == ["0"] else INFINITE)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=names == ["0"])


def _marks(
    zero: Any, axes: Any, lost: Any, values: Sequence[float | None], shift: float, colour: str, shape: str, name: str
) -> None:
    """The marks of one pass: each value in the panel where it belongs."""
    for place, value in enumerate(values):
        if value is None:
            continue
        if _has_logarithm(value):
            panel, x = axes, math.log2(value)
        elif value == 0.0:
            panel, x = zero, 0.0
        else:
            panel, x = lost, float(math.isnan(value))
        panel.plot([x], [place + shift], shape, color=colour, markersize=6, clip_on=False)


def _explain(figure: Figure, shown: Sequence[tuple[str, str, str]]) -> None:
    """The legend: the marks, and what the areas are."""
    from matplotlib.lines import Line2D

    from loops.support.plot_style import range_legend

    legend = {name: Line2D([], [], color=colour, marker=shape, linestyle="") for colour, shape, name in shown}
    areas = range_legend()
    figure.legend([*legend.values(), *areas.values()], [*legend, *areas], loc="outside lower left", ncols=2, fontsize=8)


def _label(row: Magnitude, found: Explanation) -> str:
    return f"▶ {row.layer}" if row.layer == found.layer else row.layer


def _has_logarithm(value: float) -> bool:
    return math.isfinite(value) and value > 0
