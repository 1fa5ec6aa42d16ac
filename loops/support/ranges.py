"""What float16 makes of magnitudes, as areas of a figure: the same colour for the same fate everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from loops.support.palette import RED, TINY, YELLOW


class Range(NamedTuple):
    """A range of magnitudes with one fate.

    Attributes:
        start: log2 of its lower end.
        end: log2 of its upper end.
        colour: "#RRGGBB".
        strength: The opacity of its area: yellow is paler than the others.
        said: Its name in a legend.
    """

    start: float
    end: float
    colour: str
    strength: float
    said: str


ZERO = Range(-math.inf, -25, TINY, 0.13, "becomes zero (≤ $2^{-25}$)")
SUBNORMAL = Range(-25, -14, YELLOW, 0.22, "subnormal ($2^{-24}$ to $2^{-14}$)")
INFINITE = Range(16, math.inf, RED, 0.15, "becomes infinite (≥ 65520)")
RANGES = (ZERO, SUBNORMAL, INFINITE)
"""What float16 makes zero, keeps with fewer bits, and makes infinite; between the last two all is well."""


def shade(axes: Axes, low: float, high: float) -> None:
    """Shades the ranges between two ends of an axis of log2."""
    for one in RANGES:
        if one.start < high and one.end > low:
            tint(axes, max(one.start, low), min(one.end, high), one)


def tint(axes: Axes, low: float, high: float, look: Range) -> None:
    """Shades one area in the colour of a range."""
    axes.axvspan(low, high, color=look.colour, alpha=look.strength, linewidth=0, zorder=0)


def range_legend() -> Mapping[str, Patch]:
    """What stands beside the names of the ranges in a legend."""
    return {one.said: Patch(color=one.colour, alpha=min(1.0, 2 * one.strength), linewidth=0) for one in RANGES}
