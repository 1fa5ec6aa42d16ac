"""The costs of a study's set-ups in one figure: time, memory, and energy if known."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import matplotlib.ticker
from matplotlib.figure import Figure

from loops.study.costs import cost_cells
from loops.study.dots import dot, height, name_rows, say
from loops.study.marks import marks
from loops.support.plot_style import STYLE, WIDTH

_PANELS = (("milliseconds", "ms a step"), ("bytes", "MB that a step holds"), ("joules", "J a step"))


@matplotlib.rc_context(STYLE)
def costs_figure(summary: Mapping) -> Figure:
    """A row for each set-up, and a panel for each cost that is known for at least one."""
    rows = summary["setups"]
    panels = [
        (place, key, title)
        for place, (key, title) in enumerate(_PANELS)
        if any(row.get(key) is not None for row in rows)
    ]
    figure = Figure((WIDTH, height(rows)), layout="constrained")
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    found = marks(summary)
    for axes, (place, key, title) in zip(columns, panels, strict=True):
        axes.set_title(title, loc="left")
        for at, row in enumerate(rows):
            if row.get(key) is not None:
                factor = 1e-6 if key == "bytes" else 1.0
                low, high = (factor * row.get(f"{key}_{end}", row[key]) for end in ("low", "high"))
                dot(axes, at, factor * row[key], low, high, found[row["name"]])
                say(axes, at, cost_cells(row)[place])
        axes.set_xlim(0, 1.12 * axes.dataLim.xmax)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
    name_rows(columns[0], rows)
    return figure
