"""Draws the largest magnitudes along the model, forward and backward, within the format's range."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import scaler
from loops.diagnose.explain.explanation import Explanation, Magnitude
from loops.support.drawing import drawing, save
from loops.support.errors import LoopError
from loops.support.palette import BLUE, MIDDLE, RED, SOFT, TEXT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORWARD, _BACKWARD = BLUE, RED


def picture(found: Explanation, path: str | os.PathLike) -> None:
    """Draws an explanation into a file, a PNG, SVG or PDF by its name.

    Raises:
        LoopError: If matplotlib is not installed, or there is nothing to draw.
        NotWritable: If the file cannot be written.
    """
    save(magnitudes_figure(found), path)


def magnitudes_figure(found: Explanation) -> Figure:
    """The picture as a matplotlib Figure."""
    if not found.magnitudes:
        raise LoopError("no magnitudes of the model's layers are known, so there is nothing to draw.")
    rows = found.magnitudes
    with drawing(1.6 + 0.32 * len(rows)) as figure:
        axes = figure.subplots()
        half = scaler.float_format("float16")
        low, high = math.log2(half.smallest_subnormal), math.log2(half.max)
        axes.axvspan(low, high, color=MIDDLE, zorder=0)
        axes.axvline(high, color=SOFT, linewidth=1.0)
        axes.axvline(low, color=SOFT, linewidth=1.0)
        values = [value for row in rows for value in (row.forward, row.backward) if _known(value)]
        right = max([high + 8.0, *(_octave(value) + 2.0 for value in values)])
        for place, row in enumerate(rows):
            _mark(axes, place - 0.12, row.forward, right, _FORWARD, "o")
            if found.verdict != "loss":  # The gradients of a loss that is not finite tell nothing.
                _mark(axes, place + 0.12, row.backward, right, _BACKWARD, "s")
        axes.set_yticks(range(len(rows)), [_label(row, found) for row in rows], parse_math=False)
        axes.invert_yaxis()
        axes.set_xlim(low - 4.0, right + 3.0)
        axes.set_xlabel("largest magnitude, log2  (grey: what float16 holds)")
        axes.plot([], [], "o", color=_FORWARD, label="output")
        if found.verdict != "loss":
            axes.plot([], [], "s", color=_BACKWARD, label="gradients, scaled")
        axes.plot([], [], "X", color=TEXT, label="infinite or NaN")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
        began = f", began in {found.layer!r}" if found.layer else ""
        axes.set_title(f"Step {found.step}: {found.verdict}{began}", loc="left", pad=28, parse_math=False)
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
        axes.tick_params(left=False)
        return figure


def _label(row: Magnitude, found: Explanation) -> str:
    return f"▶ {row.layer}" if row.layer == found.layer else row.layer


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _octave(value: float | None) -> float:
    return math.log2(value) if value else 0.0


def _mark(axes: Any, place: float, value: float | None, right: float, color: str, shape: str) -> None:
    if value is None or value == 0.0:
        return
    if math.isfinite(value):
        axes.plot([_octave(value)], [place], shape, color=color, markersize=6)
    else:
        axes.plot([right + 1.0], [place], "X", color=color, markersize=8)
