"""What the set-ups of a study cost, in one figure: time, memory, and energy where the machine told."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from loops.study.costs import cost_cells
from loops.support.plot_style import STYLE, WIDTH, Mark, marks, shortened

_PANELS = (("milliseconds", "ms a step"), ("bytes", "MB that a step holds"), ("joules", "J a step"))


@matplotlib.rc_context(STYLE)
def costs_figure(summary: Mapping) -> Figure:
    """A line for each set-up, with a panel for each cost that is known of any."""
    rows = summary["setups"]
    panels = [
        (place, key, title)
        for place, (key, title) in enumerate(_PANELS)
        if any(row.get(key) is not None for row in rows)
    ]
    figure = Figure((WIDTH, 0.75 + 0.27 * len(rows)), layout="constrained")
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    found = marks(summary)
    for axes, (place, key, title) in zip(columns, panels, strict=True):
        axes.set_title(title, loc="left")
        for at, row in enumerate(rows):
            if row.get(key) is not None:
                _dot(axes, at, row, key, found[row["name"]])
                text = cost_cells(row)[place]
                axes.text(1.02, at, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        axes.set_xlim(0, 1.12 * axes.dataLim.xmax)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
    columns[0].set_yticks(range(len(rows)), [shortened(row["title"], 36) for row in rows])
    for label in columns[0].get_yticklabels():
        label.set_parse_math(False)
    columns[0].set_ylim(len(rows) - 0.4, -0.6)
    return figure


def _dot(axes: Axes, at: int, row: Mapping, key: str, mark: Mark) -> None:
    factor = 1e-6 if key == "bytes" else 1.0
    low, high = row.get(f"{key}_low", row[key]), row.get(f"{key}_high", row[key])
    ends = [low * factor, high * factor]
    axes.add_line(Line2D(ends, [at, at], color=mark.colour, linewidth=2, alpha=0.5, solid_capstyle="round"))
    axes.plot(row[key] * factor, at, mark.marker, color=mark.colour, markersize=5.5, clip_on=False)
