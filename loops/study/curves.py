"""Figures of a study over its steps: pure functions of its summary and steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from loops.study.marks import marks
from loops.study.summaries import (
    Steps,
    comparable,
    failed,
    losses,
    options_of,
    place,
    runs_of,
    scale_moves,
    skipped,
    split_rows,
)
from loops.support.palette import BAND, SOFT, TEXT, Mark
from loops.support.plot_style import STYLE, WIDTH, few, head

_IN_A_COLUMN = 4
_WIDEST = 6.0
"""The widest line of a panel with several runs."""


@matplotlib.rc_context(STYLE)
def loss_figure(summary: Mapping, steps: Steps) -> Figure:
    """The loss of each set-up over the steps, a panel each, on top of float32's."""
    plain, small = split_rows(summary)
    rows = plain or small
    columns = min(2, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure((WIDTH, 0.6 + 1.75 * lines if columns > 1 else 3.2), layout="constrained")
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    loss_panels(figure, panels, rows, summary, steps)
    return figure


@matplotlib.rc_context(STYLE)
def loss_scale_figure(summary: Mapping, steps: Steps) -> Figure | None:
    """The loss scale over the steps: a panel for each set-up whose scale moved or that skipped; None without any."""
    rows = [row for row in summary["setups"] if scale_moves(summary, steps, row)]
    if not rows:
        return None
    columns = 1 if len(rows) <= _IN_A_COLUMN else 2
    lines = math.ceil(len(rows) / columns)
    figure = Figure((WIDTH, 0.7 + 1.5 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    found = marks(summary)
    for axes, row in zip(grid, rows, strict=False):
        _scale_panel(axes, row, found[row["name"]], summary, steps, narrow=columns == 2)
    _remove_last(list(grid), len(rows))
    logarithmic_scales(grid[0])
    grid[0].set_xlim(0, summary["steps"])
    seeds = summary["seeds"]
    lines_of = "" if seeds == 1 else f"; seed 0: widest line, seed {seeds - 1}: thinnest"
    figure.supxlabel(f"step (×: skipped{lines_of})", fontsize=9)
    figure.supylabel("loss scale", fontsize=9)
    return figure


def logarithmic_scales(axes: Axes) -> None:
    """Gives a panel of loss scales an axis in powers of two, with a few ticks."""
    panels = axes.get_shared_y_axes().get_siblings(axes)
    if not any(np.size(line.get_ydata()) for panel in panels for line in panel.get_lines()):
        return  # A logarithmic axis with nothing on it is an error.
    axes.set_yscale("log", base=2)
    axes.margins(y=0.2)
    low, high = np.log2(axes.get_ylim())
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(2.0 ** max(1, math.ceil((high - low) / 6)), numticks=12))
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def loss_panels(
    figure: Figure, panels: Sequence[Axes], rows: Sequence[Mapping], summary: Mapping, steps: Steps
) -> None:
    """A panel for each row with its loss on top of float32's, and one legend above all panels."""
    float32 = [row for row in summary["setups"] if options_of(summary, row)["policy"] == "float32"]
    reference = next((row for row in float32 if comparable(summary, row, rows[0])), None)
    legend: dict[str, Any] = {}
    x = np.arange(1, summary["steps"] + 1)
    found = marks(summary)
    drawn = False
    for axes, row in zip(panels, rows, strict=False):
        if reference is not None and row is not reference:
            table = _smooth(losses(summary, steps, reference))
            # The edge keeps the range visible if it is narrow, or there is a single seed.
            axes.fill_between(x, table.min(axis=0), table.max(axis=0), color=BAND, linewidth=3)
            legend[reference["title"]] = Patch(color=BAND, linewidth=0)
            drawn = drawn or bool((table.mean(axis=0) > 0).any())
        table = _smooth(losses(summary, steps, row))
        drawn = drawn or bool((table.mean(axis=0) > 0).any())
        mean = table.mean(axis=0)
        mark = found[row["name"]]
        axes.fill_between(x, table.min(axis=0), table.max(axis=0), color=mark.colour, alpha=0.3, linewidth=0)
        axes.plot(x, mean, marker=mark.marker, markersize=4.5, markevery=few(len(x)), **mark.line)
        finite = np.isfinite(mean)
        ends = np.flatnonzero(finite[:-1] & ~finite[1:])
        if ends.size:
            axes.plot(x[ends], mean[ends], "x", color=TEXT, markersize=7, markeredgewidth=1.6, clip_on=False)
            legend["next loss not finite, or none"] = Line2D([], [], color=TEXT, marker="x", linestyle="")
        if not finite.any():
            axes.text(0.5, 0.5, "no step with a finite loss", transform=axes.transAxes, ha="center", color=SOFT)
        head(axes, row["title"], mark, _ended(summary, row), room=42 if len(panels) > 1 else 60)
    _remove_last(panels, len(rows))
    if drawn:  # A logarithmic axis with nothing on it is an error.
        panels[0].set_yscale("log", nonpositive="mask")
    panels[0].set_xlim(0, summary["steps"])
    spread = "one seed" if summary["seeds"] == 1 else f"line and band: mean and range of {summary['seeds']} seeds"
    figure.supxlabel(f"step ({spread})", fontsize=9)
    figure.supylabel("loss (nats)", fontsize=9)
    if legend:
        entries = figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=len(legend))
        for text in entries.get_texts():
            text.set_parse_math(False)


def _scale_panel(axes: Axes, row: Mapping, mark: Mark, summary: Mapping, steps: Steps, narrow: bool) -> None:
    lost, runs = [], runs_of(summary, row)
    widths = np.geomspace(min(1.4 * len(runs), _WIDEST), 1.4, len(runs))
    paleness = np.linspace(0, 0.7, len(runs))[::-1]
    for run, width, pale in zip(runs, widths, paleness, strict=True):
        records = steps[run["folder"]]
        x, y = [record["step"] for record in records], [record["loss_scale"] for record in records]
        every = few(len(x))
        # A run that lies on others is drawn thinner and stronger than they are.
        look = {**mark.line, "linewidth": width, "alpha": 1 - pale, "solid_capstyle": "butt"}
        axes.step(x, y, where="post", marker=mark.marker, markersize=4.5, markevery=every, **look)
        lost += [record for record in records if skipped(record)]
    if lost:
        at = [record["step"] for record in lost], [record["loss_scale"] for record in lost]
        axes.plot(*at, "x", color=TEXT, markersize=7, markeredgewidth=1.6, clip_on=False)
    within = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    count = f"× {len(lost)}" if narrow else f"× skipped steps: {len(lost)} in {within}"
    ended = _ended(summary, row)
    head(axes, row["title"], mark, f"{count}; {ended}" if ended and not narrow else count, room=31 if narrow else 50)


def _ended(summary: Mapping, row: Mapping) -> str:
    """Where runs of the row failed, for a panel's corner."""
    broken = failed(runs_of(summary, row))
    if not broken:
        return ""
    return f"failed {place(broken[0])}" if summary["seeds"] == 1 else f"failed: {len(broken)} of {summary['seeds']}"


def _remove_last(panels: Sequence[Axes], used: int) -> None:
    """Removes the unused last panel of a grid with two columns."""
    if used < len(panels):
        panels[-1].remove()
        panels[-3].tick_params(labelbottom=True)


def _smooth(table: np.ndarray) -> np.ndarray:
    """A centred moving mean along the steps over the finite values; gaps stay gaps."""
    width = 1 + 2 * (table.shape[1] // 100)
    kernel = np.ones(width)
    finite = np.isfinite(table)
    sums = [np.convolve(row, kernel, "same") for row in np.where(finite, table, 0.0)]
    counts = [np.convolve(row, kernel, "same") for row in finite.astype(float)]
    return np.where(finite, np.array(sums) / np.maximum(counts, 1), np.nan)
