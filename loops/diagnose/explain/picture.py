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

_MARKS = (("forward", -0.16, BLUE, "o", "output"), ("backward", 0.16, RED, "s", "gradients, scaled"))
"""The marks of each pass: the field, how far they are from the layer's line, and how they are drawn and named."""


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
        from matplotlib.lines import Line2D

        from loops.support.drawing import NARROW, range_legend

        figure.set_figwidth(NARROW)
        # A zero has no logarithm, and what is not finite no place on an axis.
        zero, axes, lost = figure.subplots(1, 3, sharey=True, width_ratios=(0.08, 1.0, 0.24))
        _number_line(axes, rows)
        _outside(zero, ["0"])
        _outside(lost, ["∞", "NaN"])
        # The gradients of a loss that is not finite tell nothing.
        marks = _MARKS[:1] if found.verdict == "loss" else _MARKS
        for field, shift, colour, shape, _ in marks:
            for place, value in enumerate(getattr(row, field) for row in rows):
                if value is not None:
                    panel, x = (zero, 0.0) if value == 0.0 else (lost, float(math.isnan(value)))
                    if _has_logarithm(value):
                        panel, x = axes, math.log2(value)
                    panel.plot([x], [place + shift], shape, color=colour, markersize=6, clip_on=False)
        labels = [f"▶ {row.layer}" if row.layer == found.layer else row.layer for row in rows]
        zero.set_yticks(range(len(rows)), labels, parse_math=False)
        zero.set_ylim(len(rows) - 0.5, -0.5)
        # The marks, and what the areas are.
        legend: dict[str, Any] = {
            name: Line2D([], [], color=colour, marker=shape, linestyle="") for *_, colour, shape, name in marks
        }
        legend |= range_legend()
        figure.legend([*legend.values()], [*legend], loc="outside lower left", ncols=2, fontsize=8)
        began = f", began in {found.layer!r}" if found.layer else ""
        figure.suptitle(f"Step {found.step}: {found.verdict}{began}", x=0.01, ha="left", fontsize=10, parse_math=False)
        return figure


def _number_line(axes: Any, rows: Sequence[Magnitude]) -> None:
    """The axis of powers of two around the range of float16 and all values, with that range's ends."""
    from matplotlib.ticker import MaxNLocator

    from loops.support.drawing import shade

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
    from loops.support.drawing import INFINITE, ZERO, tint

    tint(axes, -0.5, len(names) - 0.5, ZERO if names == ["0"] else INFINITE)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=names == ["0"])


def _has_logarithm(value: float) -> bool:
    return math.isfinite(value) and value > 0
