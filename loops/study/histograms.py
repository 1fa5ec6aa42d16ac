"""Figures with histograms of gradients on float16's number line: for all set-ups, and for a small loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from loops.study.curves import loss_panels
from loops.study.marks import marks
from loops.study.summaries import Steps, options_of, runs_of, split_rows
from loops.support.palette import SOFT
from loops.support.plot_style import NARROW, STYLE, WIDTH, head
from loops.support.ranges import range_legend, shade
from loops.support.text import share

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
def small_loss_figure(summary: Mapping, steps: Steps) -> Figure:
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
    loss_panels(top, panels, shown, summary, steps)
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
