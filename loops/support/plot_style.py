"""The style of a study's figures: one colour, line and marker for each set-up in all of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

TEXT, MUTED, LIGHT = "#222222", "#666666", "#C4C4C4"
WIDTH = 7.5
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), TEXT),
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.07,
    "figure.constrained_layout.w_pad": 0.07,
}


class Mark(NamedTuple):
    """How a set-up is drawn, distinguishable also without colour.

    Attributes:
        colour: "#rrggbb".
        dashes: The line's dashes in points on and off; () for a solid line.
        marker: A matplotlib marker.
    """

    colour: str
    dashes: tuple[float, ...]
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """Arguments for drawing its line."""
        return {"color": self.colour, "linestyle": (0, self.dashes) if self.dashes else "-", "linewidth": 1.4}

    def sample(self) -> Line2D:
        """The sample next to its name in a legend."""
        return Line2D([], [], marker=self.marker, markersize=4.5, **self.line)


# Okabe and Ito's palette for colour-blind readers, without its yellow, which is too light for lines.
_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _RED, _PINK = "#0072B2", "#D55E00", "#CC79A7"
_SETUPS = {
    "float32": (_BLACK, "o"),
    "mixed-none": (_ORANGE, "s"),
    "mixed-dynamic": (_BLUE, "^"),
    "float16-none": (_RED, "D"),
    "float16-static": (_PINK, "v"),
    "float16-dynamic": (_GREEN, "X"),
}
_TINTS = (_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PINK)
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (5, 1.5, 1, 1.5), (1.5, 1))
_MARKERS = "s^DvXPo"
# The lengths 6, 4 and 7 give 84 different combinations.


def marks(summary: Mapping) -> dict[str, Mark]:
    """The mark of each set-up of a study, by name. A small-loss set-up looks like its twin, dashed."""
    found: dict[str, Mark] = {}
    others = itertools.count()
    for name in (row["name"] for row in summary["setups"]):
        tint, marker = _SETUPS.get(name.removeprefix("small-"), (None, ""))
        if tint:
            found[name] = Mark(tint, _DASHES[1] if name.startswith("small-") else (), marker)
        else:
            at = next(others)
            found[name] = Mark(_TINTS[at % 6], _DASHES[at % 4], _MARKERS[at % 7])
    return found


def shortened(title: str, room: int) -> str:
    """Cuts a title, such as a strategy with many options, to `room` characters."""
    return title if len(title) <= room else title[: room - 1] + "…"


def head(axes: Axes, title: str, mark: Mark | None, note: str = "", room: int = 60) -> None:
    """Puts a set-up's mark and title above the left end of a panel, and a note above its right end."""
    axes.set_title(note, loc="right", color=MUTED, parse_math=False)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0.25, "borderaxespad": 0}
    sample = mark.sample() if mark else Line2D([], [], linestyle="")
    entry = axes.legend([sample], [shortened(title, room)], handlelength=2.8 if mark else 0, fontsize=9, **place)
    entry.get_texts()[0].set_parse_math(False)


def few(count: int, most: int = 7) -> int:
    """The spacing of markers on a line of `count` points."""
    return max(1, count // most)
