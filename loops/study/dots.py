"""Dot plots with a row for each set-up, for the figures that compare all set-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from loops.support.marks import Mark
from loops.support.plot_style import in_two_lines


def height(rows: Sequence[Mapping]) -> float:
    """The height of a figure with a line for each row, in inches."""
    return 0.75 + 0.27 * len(rows)


def name_rows(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Writes the titles of the set-ups on the left, the first at the top."""
    axes.set_yticks(range(len(rows)), [in_two_lines(row["title"], 28) for row in rows], fontsize=8)
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
