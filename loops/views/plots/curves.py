"""Curves over the steps as figures of matplotlib: the loss, the loss scale and the headroom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import scaler
from loops.record import as_recorded
from loops.record.steps import Recorded
from loops.support.drawing import drawing
from loops.support.errors import LoopError
from loops.support.palette import BLACK, BLUE, BY_NAME, FAINT, ORANGE, RED, SERIES
from loops.support.part_names import columns_of, named
from loops.views.charts.axis import steps_axis
from loops.views.charts.chart import RUNS, Chart, Curve, envelope
from loops.views.charts.headroom import headroom_chart
from loops.views.charts.losses import loss_chart, losses_chart
from loops.views.charts.scales import scale_chart, scales_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLUMNS = 2000
"""The most points of a curve; a longer one keeps the extremes of each column."""
_MOST = 1e250
"""The largest magnitude of an axis: matplotlib's own arithmetic overflows below the largest number."""
_MARKS = 600
"""The most marks of a lane; those of steps in the same column are one."""
_HEIGHT, _LANE = 3.0, 0.34
"""Of a chart without lanes, and of each of them, in inches."""
_DASHES: Any = ("-", "--", ":", "-.", (0, (4, 4)), (0, (9, 3)))
_STYLES = ("default", "steps-post")
_LOOKS: dict[str, tuple[str, Any, float]] = {
    "faint": (FAINT, "-", 0.8),
    "blue": (BLUE, "-", 1.4),
    "orange dashed": (ORANGE, "--", 1.4),
    **{
        f"run{place}": (colour, dashes, 1.4)
        for place, (colour, dashes) in enumerate(zip((*SERIES[:5], BLACK), _DASHES, strict=True))
    },
}
"""The colour, dashes and width of a curve."""


def loss(*runs: Any) -> Figure:
    """The loss of each step, its moving mean, and marks where it was not finite.

    Args:
        runs: One to six runs, in any form that `loops.views.plots` takes. For several, only moving means are drawn. Of
            a composed step each part has a loss: six losses of all runs together.

    Raises:
        scaler.InvalidArgument: For no run, more than six losses, or something that is not a run.
        LoopError: Without matplotlib, or if no loss is finite.
    """
    if not 0 < len(runs) <= RUNS:
        raise scaler.InvalidArgument(f"loss: {len(runs)} runs: expected 1 to {RUNS}, so that curves stay distinct.")
    found = [as_recorded(run) for run in runs]
    shown = [(run, part, name) for run in found for part, name in columns_of(run.columns, "loss").items()]
    _needs("loss", *found)
    if len(shown) > RUNS:
        raise scaler.InvalidArgument(
            f"loss: {len(shown)} losses of {len(runs)} runs: expected 1 to {RUNS}, so that curves stay distinct."
        )
    if len(shown) == 1:
        return _draw(loss_chart(*shown[0]))
    one = len(found) == 1
    return _draw(losses_chart([(part if one else named(run.name, part), run, part, name) for run, part, name in shown]))


def _draw(chart: Chart) -> Figure:
    """Draws a chart: its curves over the steps, and below them a strip for each lane.

    Raises:
        LoopError: Without matplotlib, and for values that it cannot draw.
    """
    low, high = chart.y.limits
    if max(-low, high) > _MOST:
        raise LoopError(
            f"plots: a {chart.quantity} from {low:.3g} to {high:.3g}: matplotlib draws numbers up to {_MOST:g}. "
            "`halfstep report` draws all of them."
        )
    with drawing(_HEIGHT + _LANE * len(chart.lanes)) as figure:
        heights = [_HEIGHT, *[_LANE] * len(chart.lanes)]
        axes, *strips = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        if chart.y.log:
            axes.set_yscale("log", base=chart.y.log)
        axes.set_ylim(chart.y.limits, auto=False)
        if chart.level is not None:
            axes.axhline(chart.level, color=RED, linewidth=1.0)
        for curve in chart.curves:
            colour, dashes, width = _LOOKS[curve.look]
            style = {"color": colour, "linestyle": dashes, "linewidth": width, "label": curve.label}
            x, y = _points(curve, chart)
            axes.plot(x, y, drawstyle=_STYLES[curve.stairs], **style)
            alone = _alone(y)
            if alone.any():  # A line needs two points.
                axes.plot(x[alone], y[alone], ".", color=colour, markersize=3)
        axes.set_ylabel(chart.quantity, parse_math=False)
        for strip, lane in zip(strips, chart.lanes, strict=True):
            colour = _LOOKS[lane.look][0] if lane.look in _LOOKS else BY_NAME[lane.look]
            strip.vlines(_apart(lane.step, chart), 0, 1, color=colour, linewidth=1.4)
            strip.set(ylim=(0, 1), yticks=[])
            strip.grid(False)
            strip.set_title(lane.label, loc="left", parse_math=False, pad=2)
        figure.axes[-1].set_xlabel("step")
        _legend(figure, axes)
        return figure


def _needs(name: str, *runs: Recorded) -> None:
    """Refuses runs that have nothing to draw.

    Args:
        name: Of the column: "loss", which of a composed step stands for those of its parts.
        runs: Drawn in one figure.

    Raises:
        LoopError: If a run has no such column, or if none of their values is finite.
    """
    found = [[run.column(one) for one in columns_of(run.columns, name).values()] for run in runs]
    finite = any(np.isfinite(values).any() for columns in found for values in columns)
    for run, columns in zip(runs, found, strict=True):
        if not columns or not finite:
            notes = " ".join(run.notes)
            raise LoopError(f"{run.name}: nothing to draw: it has no {name} that is finite. {notes}".rstrip())


def _points(curve: Curve, chart: Chart) -> tuple[np.ndarray, np.ndarray]:
    """The steps and values to draw."""
    values = np.clip(curve.values, *chart.y.limits)
    if len(values) <= _COLUMNS:
        return curve.step, values
    if curve.stairs:
        changed = np.flatnonzero(np.diff(np.nan_to_num(values, nan=-1.0), prepend=np.nan))
        if len(changed) <= _COLUMNS:
            kept = np.append(changed, len(values) - 1)
            return curve.step[kept], values[kept]
    x = steps_axis(chart.first, chart.last)
    found = envelope(x.of(curve.step), values, _COLUMNS)
    ends = np.stack([np.where(found.broken, np.nan, found.low), found.low, found.high], axis=1)
    return np.repeat(x.low + found.x * (x.high - x.low), 3), ends.ravel()


def _alone(values: np.ndarray) -> np.ndarray:
    """Which values have a gap on both sides, bool."""
    gap = np.pad(np.isnan(values), 1, constant_values=True)
    return ~gap[1:-1] & gap[:-2] & gap[2:]


def _apart(step: np.ndarray, chart: Chart) -> np.ndarray:
    """The first step of each column that has one, so that no mark is lost between the others."""
    columns = (steps_axis(chart.first, chart.last).of(step) * _MARKS).astype(np.int64)
    return step[np.unique(columns, return_index=True)[1]]


def _legend(figure: Figure, axes: Any) -> None:
    """Above the axes, if several curves are named. Names are shown literally, not as math text."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        for text in figure.legend(handles, labels, loc="outside upper left", ncols=3).get_texts():
            text.set_parse_math(False)


def headroom(run: Any) -> Figure:
    """How often values could double: gradients up to the critical scale, others up to the format's largest number.

    Args:
        run: A run, in any form that `loops.views.plots` takes.

    Raises:
        scaler.InvalidArgument: If `run` is not a run.
        LoopError: Without matplotlib, or if the headroom is unknown: it needs a trace with probes.
    """
    found = as_recorded(run)
    chart = headroom_chart(found)
    if chart is None:
        raise LoopError(f"{found.name}: its headroom is not known. {' '.join(found.notes)}".rstrip())
    return _draw(chart)


def loss_scale(run: Any) -> Figure:
    """The loss scale, the largest one that would have been finite, and below it each skip, by its cause.

    Of a composed step it draws the scale of each part, and below them the steps that each part skipped.

    Args:
        run: A run, in any form that `loops.views.plots` takes.

    Raises:
        scaler.InvalidArgument: If `run` is not a run.
        LoopError: Without matplotlib, or if the run has no loss scale.
    """
    found = as_recorded(run)
    _needs("loss_scale", found)
    parts = columns_of(found.columns, "loss_scale")
    if parts and "" not in parts:
        return _draw(scales_chart([(part, found, part, name) for part, name in parts.items()]))
    return _draw(scale_chart(found))
