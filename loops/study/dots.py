"""Dot plots with a row for each set-up of a study, which compare all of them, and what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from loops.study.costs import cost_cells
from loops.study.curves import logarithmic_scales
from loops.study.marks import marks
from loops.study.summaries import Steps, failed, options_of, place, runs_of, scale_moves
from loops.support.palette import BAND, SOFT, Mark
from loops.support.plot_style import STYLE, WIDTH, few, in_two_lines, sample_of
from loops.support.text import share

_LEAST = 1e-5
"""The left end of the axis of shares: smaller shares, and zero, are drawn there."""
_PANELS = (("milliseconds", "ms a step"), ("bytes", "MB that a step holds"), ("joules", "J a step"))


@matplotlib.rc_context(STYLE)
def comparison_figure(summary: Mapping, steps: Steps) -> Figure:
    """A row for each set-up with its accuracy, flushed shares and skips; below, their loss scales if any ever moves."""
    rows = summary["setups"]
    moving = any(scale_moves(summary, steps, row) for row in rows)
    scaled = [row for row in rows if options_of(summary, row)["policy"] != "float32"]
    heights = (height(rows), 2.7)[: 2 if moving else 1]
    figure = Figure((WIDTH, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    columns = parts[0, 0].subplots(1, 3, sharey=True, width_ratios=(1.0, 1.15, 0.85))
    found = marks(summary)
    _accuracies(columns[0], rows, found, summary)
    _flushed(columns[1], rows, found)
    _skips(columns[2], rows, found, summary)
    name_rows(columns[0], rows)
    if moving:
        _loss_scales(parts[1, 0], scaled, found, summary, steps)
    return figure


def _accuracies(axes: Axes, rows: Sequence[Mapping], found: Mapping[str, Mark], summary: Mapping) -> None:
    axes.set_title("accuracy", loc="left")
    for at, row in enumerate(rows):
        broken = failed(runs_of(summary, row))
        if row["accuracy"] is None:
            at_left: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
            box = {"facecolor": "white", "linewidth": 0, "pad": 1}
            axes.text(0.02, at, f"failed {place(broken[0])}", bbox=box, **at_left)
            continue
        if row["name"] == "float32":
            axes.axvline(row["accuracy"], color=BAND, linewidth=3, zorder=0)
        dot(axes, at, row["accuracy"], row["accuracy_min"], row["accuracy_max"], found[row["name"]])
        say(axes, at, f"{row['accuracy']:.1%}" + (f", {len(broken)} failed" if broken else ""))
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, position: f"{100 * value:g}%"))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(2))


def _flushed(axes: Axes, rows: Sequence[Mapping], found: Mapping[str, Mark]) -> None:
    axes.set_title("gradients made zero", loc="left")
    axes.set_xscale("log")
    axes.set_xlim(_LEAST / 2, 1.6)
    for at, row in enumerate(rows):
        mark = found[row["name"]]
        for kind, face in (("flushed_weights", "white"), ("flushed_activations", mark.colour)):
            if row[kind] is not None:
                value = max(row[kind], _LEAST)
                axes.plot(
                    value, at, mark.marker, color=mark.colour, markerfacecolor=face, markersize=5.5, clip_on=False
                )
        if row["flushed_activations"] is not None:
            say(axes, at, share(row["flushed_activations"]))
    axes.set_xticks([_LEAST, 1e-2, 1], ["≤0.001%", "1%", "100%"])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("filled: activations, hollow: weights", fontsize=8, color=SOFT)


def _skips(axes: Axes, rows: Sequence[Mapping], found: Mapping[str, Mark], summary: Mapping) -> None:
    axes.set_title("skipped steps", loc="left")
    most = 0
    for at, row in enumerate(rows):
        counts = [run["skipped"] for run in runs_of(summary, row) if "error" not in run]
        if counts:
            dot(axes, at, row["skipped"], min(counts), max(counts), found[row["name"]])
            say(axes, at, f"{row['skipped']:.1f}".removesuffix(".0"))
            most = max(most, *counts)
    right = max(1.0, 1.1 * most)
    axes.set_xlim(-0.08 * right, right)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3, integer=True))


def _loss_scales(
    figure: Figure, rows: Sequence[Mapping], found: Mapping[str, Mark], summary: Mapping, steps: Steps
) -> None:
    axes = figure.subplots()
    for row in rows:
        mark = found[row["name"]]
        records = steps[runs_of(summary, row)[0]["folder"]]
        x, y = [record["step"] for record in records], [record["loss_scale"] for record in records]
        every = few(len(x))
        # The markers of each line start elsewhere, so overlaid lines stay distinguishable.
        start = every * (1 + rows.index(row)) // (1 + len(rows))
        axes.step(x, y, where="post", marker=mark.marker, markersize=4.5, markevery=(start, every), **mark.line)
    figure.legend(
        [sample_of(found[row["name"]]) for row in rows],
        [in_two_lines(row["title"], 44) for row in rows],
        loc="outside lower left",
        ncols=2,
        fontsize=8,
        handlelength=3,
    )
    logarithmic_scales(axes)
    axes.set_xlim(0, summary["steps"])
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale" if summary["seeds"] == 1 else "loss scale, seed 0")


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


@matplotlib.rc_context(STYLE)
def costs_figure(summary: Mapping) -> Figure:
    """A row for each set-up, and a panel for each cost that is known for at least one."""
    rows = summary["setups"]
    panels = [
        (number, key, title)
        for number, (key, title) in enumerate(_PANELS)
        if any(row.get(key) is not None for row in rows)
    ]
    figure = Figure((WIDTH, height(rows)), layout="constrained")
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    found = marks(summary)
    for axes, (number, key, title) in zip(columns, panels, strict=True):
        axes.set_title(title, loc="left")
        for at, row in enumerate(rows):
            if row.get(key) is not None:
                factor = 1e-6 if key == "bytes" else 1.0
                low, high = (factor * row.get(f"{key}_{end}", row[key]) for end in ("low", "high"))
                dot(axes, at, factor * row[key], low, high, found[row["name"]])
                say(axes, at, cost_cells(row)[number])
        axes.set_xlim(0, 1.12 * axes.dataLim.xmax)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
    name_rows(columns[0], rows)
    return figure
