"""How figures look: the style of their axes, the head of a panel, and what float16 makes of magnitudes.

The same fate has the same colour in all figures.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from loops.support.palette import LINE, RED, SOFT, TEXT, TINY, YELLOW, Mark

WIDTH, NARROW = 7.5, 5.6
"""The width of a figure in inches, and of one whose labels can be read on a phone, too."""
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), TEXT),
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.07,
    "figure.constrained_layout.w_pad": 0.07,
}


def sample_of(mark: Mark) -> Line2D:
    """What stands beside a name in a legend."""
    return Line2D([], [], marker=mark.marker, markersize=4.5, **mark.line)


def shortened(title: str, room: int) -> str:
    """Cuts a title, such as a strategy with many options, to `room` characters."""
    return title if len(title) <= room else title[: room - 1] + "…"


def in_two_lines(title: str, room: int) -> str:
    """Breaks a title that is longer than `room` characters, and cuts what is left after two lines."""
    return textwrap.fill(title, room, max_lines=2, placeholder="…")


def head(axes: Axes, title: str, mark: Mark | None, note: str = "", room: int = 60) -> None:
    """Puts a set-up's mark and title above the left end of a panel, and a note above its right end."""
    axes.set_title(note, loc="right", color=SOFT, parse_math=False)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0.25, "borderaxespad": 0}
    sample = sample_of(mark) if mark else Line2D([], [], linestyle="")
    entry = axes.legend([sample], [in_two_lines(title, room)], handlelength=2.8 if mark else 0, fontsize=9, **place)
    entry.get_texts()[0].set_parse_math(False)


def few(count: int, most: int = 7) -> int:
    """The spacing of markers on a line of `count` points."""
    return max(1, count // most)


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
