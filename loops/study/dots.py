"""A line for each set-up with a dot on it: what the figures of a study that compare all set-ups are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from loops.support.marks import Mark
from loops.support.plot_style import shortened


def height(rows: Sequence[Mapping]) -> float:
    """Of a figure with so many lines, in inches."""
    return 0.75 + 0.27 * len(rows)


def name_rows(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Writes the titles of the set-ups at the left, the first at the top."""
    axes.set_yticks(range(len(rows)), [shortened(row["title"], 36) for row in rows])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def dot(axes: Axes, at: int, value: float, low: float, high: float, mark: Mark) -> None:
    """A value with its range."""
    axes.add_line(Line2D([low, high], [at, at], color=mark.colour, linewidth=2, alpha=0.5, solid_capstyle="round"))
    axes.plot(value, at, mark.marker, color=mark.colour, markersize=5.5, clip_on=False)


def say(axes: Axes, at: int, text: str) -> None:
    """The value as text at the right end of its line."""
    axes.text(1.02, at, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
