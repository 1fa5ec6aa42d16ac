"""The figures of a study: pure functions of its summary and steps."""

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

from loops.record.steps import Steps
from loops.study.measured import cost_cells
from loops.study.setups import (
    StepsOf,
    comparable,
    failed,
    losses,
    marks,
    options_of,
    place,
    runs_of,
    scale_moves,
    split_rows,
)
from loops.support.drawing import NARROW, STYLE, WIDTH, few, head, in_two_lines, range_legend, sample_of, shade
from loops.support.palette import BAND, SOFT, TEXT, Mark
from loops.support.text import share

_IN_A_COLUMN = 4
_WIDEST = 6.0
"""The widest line of a panel with several runs."""


@matplotlib.rc_context(STYLE)
def loss_figure(summary: Mapping, steps: StepsOf) -> Figure:
    """The loss of each set-up over the steps, a panel each, on top of float32's."""
    plain, small = split_rows(summary)
    rows = plain or small
    columns = min(2, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure((WIDTH, 0.6 + 1.75 * lines if columns > 1 else 3.2), layout="constrained")
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    _loss_panels(figure, panels, rows, summary, steps)
    return figure


@matplotlib.rc_context(STYLE)
def loss_scale_figure(summary: Mapping, steps: StepsOf) -> Figure | None:
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
    _logarithmic_scales(grid[0])
    grid[0].set_xlim(0, summary["steps"])
    seeds = summary["seeds"]
    lines_of = "" if seeds == 1 else f"; seed 0: widest line, seed {seeds - 1}: thinnest"
    figure.supxlabel(f"step (×: skipped{lines_of})", fontsize=9)
    figure.supylabel("loss scale", fontsize=9)
    return figure


def _logarithmic_scales(axes: Axes) -> None:
    """Gives a panel of loss scales an axis in powers of two, with a few ticks."""
    panels = axes.get_shared_y_axes().get_siblings(axes)
    if not any(np.size(line.get_ydata()) for panel in panels for line in panel.get_lines()):
        return  # A logarithmic axis with nothing on it is an error.
    axes.set_yscale("log", base=2)
    axes.margins(y=0.2)
    low, high = np.log2(axes.get_ylim())
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(2.0 ** max(1, math.ceil((high - low) / 6)), numticks=12))
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def _loss_panels(
    figure: Figure, panels: Sequence[Axes], rows: Sequence[Mapping], summary: Mapping, steps: StepsOf
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


def _scale_panel(axes: Axes, row: Mapping, mark: Mark, summary: Mapping, steps: StepsOf, narrow: bool) -> None:
    runs = runs_of(summary, row)
    logs = [steps[run["folder"]] for run in runs]
    widths = np.geomspace(min(1.4 * len(runs), _WIDEST), 1.4, len(runs))
    paleness = np.linspace(0, 0.7, len(runs))[::-1]
    for log, width, pale in zip(logs, widths, paleness, strict=True):
        # A run that lies on others is drawn thinner and stronger than they are.
        look = {**mark.line, "linewidth": width, "alpha": 1 - pale, "solid_capstyle": "butt"}
        _draw_scales(axes, log, mark, few(len(log)), **look)
    lost = np.concatenate([log.step[log.skipped] for log in logs])
    if len(lost):
        scales = np.concatenate([log.column("loss_scale")[log.skipped] for log in logs])
        axes.plot(lost, scales, "x", color=TEXT, markersize=7, markeredgewidth=1.6, clip_on=False)
    within = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    count = f"× {len(lost)}" if narrow else f"× skipped steps: {len(lost)} in {within}"
    ended = _ended(summary, row)
    head(axes, row["title"], mark, f"{count}; {ended}" if ended and not narrow else count, room=31 if narrow else 50)


def _draw_scales(axes: Axes, log: Steps, mark: Mark, every: int | tuple[int, int], **look: Any) -> None:
    scales = log.column("loss_scale")
    axes.step(log.step, scales, where="post", marker=mark.marker, markersize=4.5, markevery=every, **look)


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


_LEAST = 1e-5
"""The left end of the axis of shares: smaller shares, and zero, are drawn there."""
_PANELS = (("milliseconds", "ms a step"), ("bytes", "MB that a step holds"), ("joules", "J a step"))


@matplotlib.rc_context(STYLE)
def comparison_figure(summary: Mapping, steps: StepsOf) -> Figure:
    """A row for each set-up with its accuracy, flushed shares and skips; below, their loss scales if any ever moves."""
    rows = summary["setups"]
    moving = any(scale_moves(summary, steps, row) for row in rows)
    scaled = [row for row in rows if options_of(summary, row)["policy"] != "float32"]
    heights = (_height(rows), 2.7)[: 2 if moving else 1]
    figure = Figure((WIDTH, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    columns = parts[0, 0].subplots(1, 3, sharey=True, width_ratios=(1.0, 1.15, 0.85))
    found = marks(summary)
    _accuracies(columns[0], rows, found, summary)
    _flushed(columns[1], rows, found)
    _skips(columns[2], rows, found, summary)
    _name_rows(columns[0], rows)
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
        _dot(axes, at, row["accuracy"], row["accuracy_min"], row["accuracy_max"], found[row["name"]])
        _say(axes, at, f"{row['accuracy']:.1%}" + (f", {len(broken)} failed" if broken else ""))
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
            _say(axes, at, share(row["flushed_activations"]))
    axes.set_xticks([_LEAST, 1e-2, 1], ["≤0.001%", "1%", "100%"])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("filled: activations, hollow: weights", fontsize=8, color=SOFT)


def _skips(axes: Axes, rows: Sequence[Mapping], found: Mapping[str, Mark], summary: Mapping) -> None:
    axes.set_title("skipped steps", loc="left")
    most = 0
    for at, row in enumerate(rows):
        counts = [run["skipped"] for run in runs_of(summary, row) if "error" not in run]
        if counts:
            _dot(axes, at, row["skipped"], min(counts), max(counts), found[row["name"]])
            _say(axes, at, f"{row['skipped']:.1f}".removesuffix(".0"))
            most = max(most, *counts)
    right = max(1.0, 1.1 * most)
    axes.set_xlim(-0.08 * right, right)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3, integer=True))


def _loss_scales(
    figure: Figure, rows: Sequence[Mapping], found: Mapping[str, Mark], summary: Mapping, steps: StepsOf
) -> None:
    axes = figure.subplots()
    for row in rows:
        mark = found[row["name"]]
        log = steps[runs_of(summary, row)[0]["folder"]]
        every = few(len(log))
        # The markers of each line start elsewhere, so overlaid lines stay distinguishable.
        start = every * (1 + rows.index(row)) // (1 + len(rows))
        _draw_scales(axes, log, mark, (start, every), **mark.line)
    figure.legend(
        [sample_of(found[row["name"]]) for row in rows],
        [in_two_lines(row["title"], 44) for row in rows],
        loc="outside lower left",
        ncols=2,
        fontsize=8,
        handlelength=3,
    )
    _logarithmic_scales(axes)
    axes.set_xlim(0, summary["steps"])
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale" if summary["seeds"] == 1 else "loss scale, seed 0")


def _height(rows: Sequence[Mapping]) -> float:
    """The height of a figure with a line for each row, in inches."""
    return 0.75 + 0.27 * len(rows)


def _name_rows(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Writes the titles of the set-ups on the left, the first at the top."""
    axes.set_yticks(range(len(rows)), [in_two_lines(row["title"], 28) for row in rows], fontsize=8)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _dot(axes: Axes, at: int, value: float, low: float, high: float, mark: Mark) -> None:
    """A value with its range."""
    axes.add_line(Line2D([low, high], [at, at], color=mark.colour, linewidth=2, alpha=0.5, solid_capstyle="round"))
    axes.plot(value, at, mark.marker, color=mark.colour, markersize=5.5, clip_on=False)


def _say(axes: Axes, at: int, text: str) -> None:
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
    figure = Figure((WIDTH, _height(rows)), layout="constrained")
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    found = marks(summary)
    for axes, (number, key, title) in zip(columns, panels, strict=True):
        axes.set_title(title, loc="left")
        for at, row in enumerate(rows):
            if row.get(key) is not None:
                factor = 1e-6 if key == "bytes" else 1.0
                low, high = (factor * row.get(f"{key}_{end}", row[key]) for end in ("low", "high"))
                _dot(axes, at, factor * row[key], low, high, found[row["name"]])
                _say(axes, at, cost_cells(row)[number])
        axes.set_xlim(0, 1.12 * axes.dataLim.xmax)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
    _name_rows(columns[0], rows)
    return figure


_KINDS = ("activations", "weights")


@matplotlib.rc_context(STYLE)
def gradients_figure(summary: Mapping) -> Figure:
    """Histograms of gradient sizes for each 16-bit set-up: activations on the left, weights on the right."""
    plain, small = split_rows(summary)
    rows = plain or small
    rows = [row for row in rows if options_of(summary, row)["policy"] != "float32"] or rows
    figure = Figure((WIDTH, 1.1 + 1.3 * len(rows)), layout="constrained")
    _histograms(figure, summary, rows, _KINDS)
    return figure


@matplotlib.rc_context(STYLE)
def small_loss_figure(summary: Mapping, steps: StepsOf) -> Figure:
    """Why scaling exists: the loss, and the gradients of activations, where the loss is tiny."""
    # All that is here has a small loss, so no title has to say it.
    setups = [{**row, "title": row["title"].removeprefix("small loss: ")} for row in summary["setups"]]
    summary = {**summary, "setups": setups}
    shown = _none_and_dynamic(summary, split_rows(summary)[1])
    heights = (2.1, 1.1 + 1.25 * len(shown))
    figure = Figure((NARROW, sum(heights)), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=heights)
    top, bottom = halves
    panels = list(top.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False).flat)
    _loss_panels(top, panels, shown, summary, steps)
    _histograms(bottom, summary, shown, _KINDS[:1])
    return figure


def _histograms(figure: Figure, summary: Mapping, rows: Sequence[Mapping], kinds: Sequence[str]) -> None:
    grid = figure.subplots(len(rows), len(kinds), sharex=True, sharey=True, squeeze=False)
    found = marks(summary)
    for row, line in zip(rows, grid, strict=True):
        for kind, axes in zip(kinds, line, strict=True):
            counts = [run["gradients"][kind] for run in runs_of(summary, row)]
            mark = found[row["name"]]
            first = kind == kinds[0]
            head(axes, row["title"] if first else "", mark if first else None, room=42 if len(kinds) > 1 else 60)
            _panel(axes, counts, mark.colour)
    top: Any = grid[0]
    for kind, axes in zip(kinds, grid[-1], strict=True):
        axes.set_xlabel(f"size of the gradients of {kind}")
    top[0].set_ylim(0, 1.6 * _highest(summary, rows, kinds))
    top[0].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    top[0].xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(20 if len(kinds) > 1 else 10))
    top[0].xaxis.set_major_formatter(lambda x, position: f"$2^{{{x:.0f}}}$")
    legend = {"before scaling": Patch(color=SOFT, alpha=0.4, linewidth=0), **range_legend()}
    figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=2)
    figure.supylabel("share of non-zero values", fontsize=9)


def _panel(axes: Axes, counts: Sequence[Mapping], tint: str) -> None:
    edges = counts[0]["lowest_exponent"] + np.arange(len(counts[0]["histogram"]) + 1)
    axes.set_xlim(edges[0], edges[-1] + 3)
    shade(axes, edges[0], edges[-1] + 3)
    nonzero = sum(count["nonzero"] for count in counts)
    if not nonzero:
        axes.text(0.5, 0.4, "no visit with finite weights", transform=axes.transAxes, ha="center", color=SOFT)
        return
    before = np.sum([count["histogram"] for count in counts], axis=0)
    scaled = np.sum([count["scaled_histogram"] for count in counts], axis=0)
    said = f"made zero: {share(sum(count['flushed'] for count in counts) / nonzero)}"
    infinite = sum(count["overflowed"] for count in counts)
    said += f", infinite: {share(infinite / nonzero)}" if infinite else ""
    if (before != scaled).any():
        axes.stairs(before / nonzero, edges, color=SOFT, fill=True, alpha=0.3)
        said += f"\nwithout the scale: {share(before[edges[:-1] < -25].sum() / nonzero)}"
    axes.stairs(scaled / nonzero, edges, color=tint, fill=True, alpha=0.3)
    axes.stairs(scaled / nonzero, edges, color=tint, linewidth=1.4)
    axes.text(0.02, 0.94, said, transform=axes.transAxes, va="top", fontsize=8)


def _highest(summary: Mapping, rows: Sequence[Mapping], kinds: Sequence[str]) -> float:
    """The largest share in a bin except the outermost two, which may hold nearly all values."""
    runs = [run for row in rows for run in runs_of(summary, row)]
    counts = [run["gradients"][kind] for run in runs for kind in kinds if run["gradients"][kind]["nonzero"]]
    heights = [
        max(count[name][1:-1]) / count["nonzero"] for count in counts for name in ("histogram", "scaled_histogram")
    ]
    return max(heights, default=0.0) or 1.0


def _none_and_dynamic(summary: Mapping, rows: Sequence[Mapping]) -> list[Mapping]:
    """Of the 16-bit rows, one without scaling and one with a dynamic scale, if present."""
    narrow = [row for row in rows if options_of(summary, row)["policy"] != "float32"]
    # Mixed set-ups differ from float32 only in the compute dtype.
    narrow.sort(key=lambda row: not options_of(summary, row)["policy"].startswith("mixed"))
    starts = [
        [row for row in narrow if options_of(summary, row)["strategy"].startswith(kind)] for kind in ("none", "dynamic")
    ]
    return [found[0] for found in starts if found] or list(narrow or rows)[:1]
