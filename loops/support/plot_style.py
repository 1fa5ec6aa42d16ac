"""How figures look: the style of their axes, and the head of a panel."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from loops.support.palette import LINE, SOFT, TEXT, Mark

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
