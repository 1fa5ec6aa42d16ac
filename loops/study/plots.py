"""The figures of a study: pure functions from its summary and its steps to matplotlib figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loops.errors import LoopError

try:
    import matplotlib
    import matplotlib.ticker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ImportError as error:
    raise LoopError('the figures need matplotlib: pip install "halfstep[study]"') from error

# Okabe and Ito's palette, which colour-blind readers can tell apart. A small-loss set-up looks like its twin.
_COLOURS = {
    "float32": "#000000",
    "mixed-none": "#E69F00",
    "mixed-dynamic": "#0072B2",
    "float16-none": "#D55E00",
    "float16-static": "#CC79A7",
    "float16-dynamic": "#009E73",
}
_OTHER_COLOUR = "#56B4E9"
_TEXT, _MUTED, _LIGHT = "#222222", "#666666", "#C4C4C4"
_WIDTH = 7.5
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _TEXT),
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.07,
    "figure.constrained_layout.w_pad": 0.07,
}
_SCALES_IN_A_COLUMN = 4
# float16's number line in powers of two: values of 2^-25 and less become zero, those of 65520 and more infinite.
_REGIONS = (
    (-math.inf, -25, "#D55E00", "zero\n≤ $2^{-25}$"),
    (-25, -14, "#F0E442", "subnormal\n$2^{-24}$ to $2^{-14}$"),
    (-14, 16, None, "normal: full precision"),
    (16, math.inf, "#D55E00", "overflow\n≥ 65520"),
)

Steps = Mapping[str, Sequence[Mapping]]
"""The lines of each run's `steps.jsonl`, by the run's `folder`."""


def colour(name: str) -> str:
    """The colour of a set-up, the same in every figure, as "#rrggbb"."""
    return _COLOURS.get(name.removeprefix("small-"), _OTHER_COLOUR)


def share(value: float) -> str:
    """A share of gradient values as a percentage: "8.5%", "0.02%", "<0.001%", "0%"."""
    if value in (0, 1):
        return f"{value:.0%}"
    if value < 1e-5 or value > 0.999:
        return "<0.001%" if value < 1e-5 else ">99.9%"
    return f"{value:.{3 if value < 1e-4 else 2 if value < 0.01 else 1}%}"


def runs_of(summary: Mapping, row: Mapping) -> list[Mapping]:
    """The runs of a row of `summary["setups"]`."""
    return [run for run in summary["runs"] if run["setup"] == row["name"]]


def split_rows(summary: Mapping) -> tuple[list[Mapping], list[Mapping]]:
    """The rows of `summary["setups"]` that train on the plain loss, and those on a loss times another constant."""
    plain = [row for row in summary["setups"] if _run(summary, row)["loss_factor"] == 1]
    return plain, [row for row in summary["setups"] if row not in plain]


def losses(summary: Mapping, steps: Steps, row: Mapping) -> np.ndarray:
    """The losses of a set-up without its constant factor, float [seeds, steps]; NaN where one was not finite."""
    table = np.full((len(runs_of(summary, row)), summary["steps"]), np.nan)
    for values, run in zip(table, runs_of(summary, row), strict=True):
        for record in steps[run["folder"]]:
            if record["loss"] is not None:
                values[record["step"] - 1] = record["loss"] / run["loss_factor"]
    return table


@matplotlib.rc_context(_STYLE)
def loss_figure(summary: Mapping, steps: Steps) -> Figure:
    """The loss of each set-up over the steps, a panel each, on top of float32's."""
    plain, small = split_rows(summary)
    rows = plain or small
    columns = min(2, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure((_WIDTH, 0.6 + 1.75 * lines if columns > 1 else 3.2), layout="constrained")
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    _loss_panels(figure, panels, rows, summary, steps)
    return figure


@matplotlib.rc_context(_STYLE)
def loss_scale_figure(summary: Mapping, steps: Steps) -> Figure:
    """The loss scale over the steps: a panel for each set-up where it moves or a step was skipped.

    Constant scales are lines in these panels, or where there are many of them panels, too.
    """
    moving: list = []
    constant: list = []
    for row in summary["setups"]:
        records = [record for run in runs_of(summary, row) for record in steps[run["folder"]]]
        scales = {record["loss_scale"] for record in records}
        (moving if len(scales) > 1 or any(_skipped(record) for record in records) else constant).append(row)
    columns = 1 if len(moving) <= _SCALES_IN_A_COLUMN else 2
    if columns == 2:
        # Narrow panels have no room for the names of others.
        moving = [row for row in summary["setups"] if row in moving or _run(summary, row)["loss_scale"] != 1]
        constant = []
    panels = max(1, len(moving))
    lines = math.ceil(panels / columns)
    figure = Figure((_WIDTH, 0.7 + 1.5 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    if panels < len(grid):
        grid[-1].remove()
        grid[-3].tick_params(labelbottom=True)
    for axes, row in zip(grid, moving, strict=False):
        _scale_panel(axes, row, summary, steps, narrow=columns == 2)
        # Without scaling there is nothing to see, and 1 is far below everything else.
        _constant_scales(axes, [other for other in constant if _comparable(summary, row, other)], summary, hidden=1.0)
    if not moving:
        _constant_scales(grid[0], constant, summary)
    grid[0].set_yscale("log", base=2)
    grid[0].margins(y=0.2)
    low, high = np.log2(grid[0].get_ylim())
    grid[0].yaxis.set_major_locator(
        matplotlib.ticker.LogLocator(2.0 ** max(1, math.ceil((high - low) / 6)), numticks=12)
    )
    grid[0].yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    grid[0].set_xlim(0, summary["steps"])
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss scale", fontsize=9)
    return figure


@matplotlib.rc_context(_STYLE)
def gradients_figure(summary: Mapping) -> Figure:
    """Histograms of the gradients' sizes on float16's number line, without scaling and with a dynamic scale."""
    plain, small = split_rows(summary)
    rows = _none_and_dynamic(summary, plain or small)
    panels = [(kind, row) for kind in ("activations", "weights") for row in rows]
    figure = Figure((_WIDTH, 0.7 + 1.5 * len(panels)), layout="constrained")
    _histograms(figure, summary, panels)
    return figure


@matplotlib.rc_context(_STYLE)
def small_loss_figure(summary: Mapping, steps: Steps) -> Figure:
    """Why scaling exists: the loss, and the gradients of activations, where the loss is tiny."""
    rows = split_rows(summary)[1]
    shown = _none_and_dynamic(summary, rows)
    heights = (2.4, 0.5 + 1.5 * len(shown))
    figure = Figure((_WIDTH, sum(heights)), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=heights)
    top, bottom = halves
    panels = list(top.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False).flat)
    _loss_panels(top, panels, shown, summary, steps)
    _histograms(bottom, summary, [("activations", row) for row in shown])
    return figure


def _loss_panels(figure, panels: Sequence[Axes], rows: Sequence[Mapping], summary: Mapping, steps: Steps) -> None:
    float32 = [row for row in summary["setups"] if _run(summary, row)["policy"] == "float32"]
    reference = next((row for row in float32 if _comparable(summary, row, rows[0])), None)
    spread = "one seed" if summary["seeds"] == 1 else f"mean and range of {summary['seeds']} seeds"
    legend: dict[str, Any] = {
        spread: (Patch(color=_MUTED, alpha=0.3, linewidth=0), Line2D([], [], color=_TEXT, linewidth=1.4))
    }
    x = np.arange(1, summary["steps"] + 1)
    drawn = False
    for axes, row in zip(panels, rows, strict=False):
        if reference is not None and row is not reference:
            table = _smooth(losses(summary, steps, reference))
            # The edge keeps the range visible where it is narrow, or a single seed.
            axes.fill_between(x, table.min(axis=0), table.max(axis=0), color=_LIGHT, linewidth=3)
            legend[reference["title"]] = Patch(color=_LIGHT, linewidth=0)
            drawn = drawn or bool((table > 0).any())
        table = _smooth(losses(summary, steps, row))
        drawn = drawn or bool((table > 0).any())
        mean = table.mean(axis=0)
        axes.fill_between(x, table.min(axis=0), table.max(axis=0), color=colour(row["name"]), alpha=0.3, linewidth=0)
        axes.plot(x, mean, color=colour(row["name"]), linewidth=1.4)
        finite = np.isfinite(mean)
        ends = np.flatnonzero(finite[:-1] & ~finite[1:])
        if ends.size:
            axes.plot(x[ends], mean[ends], "x", color=_TEXT, markersize=7, markeredgewidth=1.6, clip_on=False)
            legend["next loss not finite"] = Line2D([], [], color=_TEXT, marker="x", linestyle="")
        if not finite.any():
            axes.text(0.5, 0.5, "no step with a finite loss", transform=axes.transAxes, ha="center", color=_MUTED)
        axes.set_title(row["title"], loc="left", parse_math=False)
    if len(rows) < len(panels):
        panels[-1].remove()
        panels[-3].tick_params(labelbottom=True)
    if drawn:  # A logarithmic axis with nothing on it is an error.
        panels[0].set_yscale("log", nonpositive="mask")
    panels[0].set_xlim(0, summary["steps"])
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss (nats)", fontsize=9)
    entries = figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=len(legend))
    for text in entries.get_texts():
        text.set_parse_math(False)


def _scale_panel(axes: Axes, row: Mapping, summary: Mapping, steps: Steps, narrow: bool) -> None:
    lost = []
    for run in runs_of(summary, row):
        records = steps[run["folder"]]
        x = [record["step"] for record in records]
        axes.step(x, [record["loss_scale"] for record in records], where="post", color=colour(row["name"]), alpha=0.8)
        lost += [record for record in records if _skipped(record)]
    if lost:
        at = [record["step"] for record in lost], [record["loss_scale"] for record in lost]
        axes.plot(*at, "x", color=_TEXT, markersize=7, markeredgewidth=1.6, clip_on=False)
    runs = "one run" if summary["seeds"] == 1 else f"{summary['seeds']} runs"
    # A strategy with many options would run into what stands on the right.
    room = 30 if narrow else 60
    title = row["title"] if len(row["title"]) <= room else row["title"][: room - 1] + "…"
    axes.set_title(title, loc="left", parse_math=False)
    count = f"× skipped: {len(lost)}" if narrow else f"× skipped steps: {len(lost)} in {runs}"
    axes.set_title(count, loc="right", color=_MUTED)


def _constant_scales(axes: Axes, rows: Sequence[Mapping], summary: Mapping, hidden: float | None = None) -> None:
    names: dict[float, list[str]] = {}
    for row in rows:
        names.setdefault(_run(summary, row)["loss_scale"], []).append(row["name"])
    for value, found in names.items():
        if value != hidden:
            axes.axhline(value, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
            label = f"constant {value:g}: {', '.join(found)}"
            at: dict[str, Any] = {
                "xycoords": ("axes fraction", "data"),
                "textcoords": "offset points",
                "in_layout": False,
            }
            axes.annotate(label, (1, value), (0, 3), ha="right", color=_MUTED, **at)


def _histograms(figure, summary: Mapping, panels: Sequence[tuple[str, Mapping]]) -> None:
    grid = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (kind, row) in zip(grid, panels, strict=True):
        counts = [run["gradients"][kind] for run in runs_of(summary, row)]
        nonzero = sum(count["nonzero"] for count in counts)
        before = np.sum([count["histogram"] for count in counts], axis=0)
        scaled = np.sum([count["scaled_histogram"] for count in counts], axis=0)
        edges = counts[0]["lowest_exponent"] + np.arange(len(before) + 1)
        axes.set_title(f"gradients of {kind}: {row['title']}", loc="left", parse_math=False)
        axes.set_xlim(edges[0], edges[-1] + 3)
        _shade(axes, labels=axes is grid[0])
        if not nonzero:
            axes.text(0.5, 0.4, "no visit with finite weights", transform=axes.transAxes, ha="center", color=_MUTED)
            continue
        flushed = f"zero: {share(sum(count['flushed'] for count in counts) / nonzero)}"
        if (before != scaled).any():
            lost = share(before[edges[:-1] < -25].sum() / nonzero)
            _hump(axes, edges, before / nonzero, _MUTED, f"before scaling\nzero: {lost}", left=True)
            flushed = f"at the scale in use\n{flushed}"
        _hump(axes, edges, scaled / nonzero, colour(row["name"]), flushed, left=False)
    grid[0].set_ylim(0, 1.3 * grid[0].get_ylim()[1])
    grid[0].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    grid[0].xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(10))
    grid[0].xaxis.set_major_formatter(lambda x, position: f"$2^{{{x:.0f}}}$")
    figure.supxlabel("size of a gradient value", fontsize=9)
    figure.supylabel("share of non-zero values", fontsize=9)


def _hump(axes: Axes, edges: np.ndarray, shares: np.ndarray, tint: str, label: str, left: bool) -> None:
    axes.stairs(shares, edges, color=tint, fill=True, alpha=0.3)
    axes.stairs(shares, edges, color=tint, linewidth=1.4)
    below = np.cumsum(shares)
    start, end = edges[np.searchsorted(below, 0.03)], edges[np.searchsorted(below, 0.97) + 1]
    # What stands on the left needs about 11 powers of two.
    at = max(start, edges[0] + 11) if left else end
    place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "right" if left else "left", "va": "center"}
    axes.text(at, 0.5, label, fontsize=8, **place)


def _shade(axes: Axes, labels: bool) -> None:
    low, high = axes.get_xlim()
    for start, end, tint, label in _REGIONS:
        start, end = max(start, low), min(end, high)
        if tint:
            axes.axvspan(start, end, color=tint, alpha=0.13, linewidth=0)
        if labels:
            at = axes.get_xaxis_transform()
            axes.text((start + end) / 2, 0.95, label, transform=at, ha="center", va="top", fontsize=8, color=_MUTED)


def _none_and_dynamic(summary: Mapping, rows: Sequence[Mapping]) -> list[Mapping]:
    """Of the 16-bit rows, one without scaling and one with a dynamic scale, as far as they are there."""
    narrow = [row for row in rows if _run(summary, row)["policy"] != "float32"]
    # Mixed set-ups differ from float32 in nothing but the compute dtype.
    narrow.sort(key=lambda row: not _run(summary, row)["policy"].startswith("mixed"))
    starts = [
        [row for row in narrow if _run(summary, row)["strategy"].startswith(kind)] for kind in ("none", "dynamic")
    ]
    return [found[0] for found in starts if found] or list(narrow or rows)[:1]


def _run(summary: Mapping, row: Mapping) -> Mapping:
    return runs_of(summary, row)[0]


def _comparable(summary: Mapping, row: Mapping, other: Mapping) -> bool:
    return _run(summary, row)["loss_factor"] == _run(summary, other)["loss_factor"]


def _skipped(record: Mapping) -> bool:
    return record["attempted"] and not record["applied"]


def _smooth(table: np.ndarray) -> np.ndarray:
    """A centred moving mean along the steps over what is finite; gaps stay gaps."""
    width = 1 + 2 * (table.shape[1] // 100)
    kernel = np.ones(width)
    finite = np.isfinite(table)
    sums = [np.convolve(row, kernel, "same") for row in np.where(finite, table, 0.0)]
    counts = [np.convolve(row, kernel, "same") for row in finite.astype(float)]
    return np.where(finite, np.array(sums) / np.maximum(counts, 1), np.nan)
