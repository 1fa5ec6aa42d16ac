"""Plots of a recorded run, each a matplotlib `Figure`. They need the extra `study`.

Each function takes a run as its first argument: the path of its folder, its trace or its log; what `loops.observe.read`
returned; or a mapping of arrays [steps], such as `{"loss": ..., "loss_scale": ..., "applied": ...}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import scaler
from loops.record import as_recorded
from loops.record.steps import Recorded
from loops.support.drawing import drawing
from loops.support.errors import LoopError
from loops.support.palette import (
    BLACK,
    BLUE,
    BY_NAME,
    FAINT,
    HUGE,
    MIDDLE,
    ORANGE,
    PINK,
    RED,
    SERIES,
    TINY,
    YELLOW,
)
from loops.support.part_names import columns_of
from loops.views.chart import (
    ALL_ZERO,
    FIRST,
    INFINITE,
    LOWEST,
    NOT_A_NUMBER,
    NOT_MEASURED,
    RUNS,
    Chart,
    Curve,
    envelope,
    heat_cells,
    steps_axis,
)
from loops.views.curves import headroom_chart, loss_chart, losses_chart, scale_chart, scales_chart, shown_of
from scaler import observe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["exponents", "headroom", "histogram", "loss", "loss_scale"]

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
    shown = shown_of(found, "loss")
    _needs("loss", *found)
    if len(shown) > RUNS:
        raise scaler.InvalidArgument(
            f"loss: {len(shown)} losses of {len(runs)} runs: expected 1 to {RUNS}, so that curves stay distinct."
        )
    return _draw(loss_chart(shown[0]) if len(shown) == 1 else losses_chart(shown))


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
    shown = shown_of([found], "loss_scale")
    return _draw(scales_chart(shown) if shown and shown[0].part else scale_chart(found))


_CELLS = 400
_SPECIAL = ((ALL_ZERO, YELLOW, "all zero"), (NOT_A_NUMBER, PINK, "NaN"), (INFINITE, BLACK, "infinite"))
_LOW, _HIGH = -24, 16
"""float16's range in powers of two; the colours show how near its ends a value is."""


def exponents(run: Any, kind: str = "activation_gradients") -> Figure:
    """The largest magnitude of each tensor over the steps, as a power of two within float16's range.

    Blue is near the smallest number of float16, orange near its largest. Yellow is all zero, pink NaN, black infinite.
    Nothing is drawn where nothing was measured, as between the turns of a part.

    Args:
        run: A run, in any form that `loops.views.plots` takes.
        kind: Which tensors: "activations", "activation_gradients", "weight_gradients", "weights", "updates", "slots".

    Raises:
        scaler.InvalidArgument: If `run` is not a run, or `kind` was not measured.
        LoopError: Without matplotlib, or if the run measured no tensors.
    """
    found = as_recorded(run)
    measured = found.tensors
    if measured is None or not len(measured.step):
        raise LoopError(f"{found.name}: no tensor was measured. {' '.join(found.notes)}".rstrip())
    chosen = [place for place, name in enumerate(measured.names) if name.startswith(f"{kind}/")]
    if not chosen:
        kinds = sorted({name.partition("/")[0] for name in measured.names})
        raise scaler.InvalidArgument(f"exponents(kind={kind!r}): expected one of {', '.join(kinds)}.")
    starts, cells = heat_cells(measured, np.array(chosen), _CELLS)
    with drawing(1.4 + 0.2 * len(chosen)) as figure:
        from matplotlib.colors import LinearSegmentedColormap, ListedColormap
        from matplotlib.patches import Patch

        axes = figure.subplots()
        axes.grid(False)
        steps, rows = np.append(starts, measured.step[-1] + 1), np.arange(len(chosen) + 1)
        colours = LinearSegmentedColormap.from_list("exponents", [TINY, MIDDLE, HUGE], _HIGH - _LOW)
        exponent = np.ma.masked_where(cells < FIRST, cells.astype(np.int64) - FIRST + LOWEST)
        mesh = axes.pcolormesh(steps, rows, exponent, cmap=colours, vmin=_LOW, vmax=_HIGH, rasterized=True)
        special = np.ma.masked_where((cells >= FIRST) | (cells == NOT_MEASURED), cells)
        tints = ListedColormap([colour for _, colour, _ in _SPECIAL])
        axes.pcolormesh(steps, rows, special, cmap=tints, vmin=_SPECIAL[0][0], vmax=_SPECIAL[-1][0], rasterized=True)
        named = [Patch(color=colour, label=label) for code, colour, label in _SPECIAL if (cells == code).any()]
        if named:
            figure.legend(handles=named, loc="outside upper left", ncols=len(named))
        names = [measured.names[place].partition("/")[2] for place in chosen]
        axes.set_yticks(np.arange(len(chosen)) + 0.5, names, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel("step")
        axes.set_title(kind.replace("_", " "), loc="left")
        bar = figure.colorbar(mesh, ax=axes, label="log2 of the largest magnitude", ticks=[-24, -14, 0, 16])
        bar.ax.set_yticklabels(["-24: smallest", "-14: smallest normal", "0", "16: infinite"])
        return figure


def histogram(run: Any, tensor: str, step: int | None = None) -> Figure:
    """The values of a tensor by exponent, with the range of its format shaded.

    Args:
        run: A run, in any form that `loops.views.plots` takes.
        tensor: The tensor's name, such as "activation_gradients/dense_1".
        step: The step; the nearest one with a histogram of this tensor is shown (default: the last).

    Raises:
        scaler.InvalidArgument: If `run` is not a run, or `tensor` was not measured.
        LoopError: Without matplotlib, or if the run has no histogram of this tensor.
    """
    found = as_recorded(run)
    measured = found.tensors
    if measured is None or not len(measured.frames):
        raise LoopError(f"{found.name}: it has no histograms. {' '.join(found.notes)}".rstrip())
    if tensor not in measured.names:
        raise scaler.InvalidArgument(f"histogram(tensor={tensor!r}): expected one of {', '.join(measured.names)}.")
    place = measured.names.index(tensor)
    # Of a part there are only histograms of its turns.
    frames = np.unique(measured.counted[measured.tensor == place])
    if not len(frames):
        raise LoopError(f"{found.name}: it has no histograms of {tensor}, only of others.")
    at = int(frames[-1] if step is None else frames[np.abs(frames - step).argmin()])
    mine = (measured.counted == at) & (measured.tensor == place)
    counts = np.bincount(measured.bin[mine], measured.count[mine], observe.BINS)
    limits = scaler.float_format(measured.formats[place])
    inside = counts[observe.bin_of(observe.LOWEST) : observe.INFINITY]
    edges = np.arange(observe.LOWEST, observe.LOWEST + len(inside) + 1)
    total = max(counts.sum(), 1.0)
    with drawing(2.6) as figure:
        axes = figure.subplots()
        low, normal, high = (np.log2(one) for one in (limits.smallest_subnormal, limits.smallest_normal, limits.max))
        axes.axvspan(low, high, color=MIDDLE, zorder=0)
        axes.axvline(normal, color=FAINT, linewidth=1.0)
        tints = np.where(edges[:-1] < normal, ORANGE, BLUE)
        axes.bar(edges[:-1] + 0.5, inside / total, width=0.9, color=tints)
        used = np.flatnonzero(inside)
        seen = edges[used] if len(used) else np.array([0])
        narrow = limits.name == "float16"
        axes.set_xlim(min(seen.min(), low if narrow else seen.min()) - 2, max(seen.max(), high if narrow else 0) + 3)
        special = {"zero": observe.ZERO, "infinite": observe.INFINITY, "NaN": observe.NAN}
        shares = ", ".join(f"{name} {counts[one] / total:.2%}" for name, one in special.items() if counts[one])
        axes.set_title(f"{tensor}, step {at}", loc="left", parse_math=False)
        axes.set_title(shares, loc="right")
        axes.set_xlabel(f"exponent (shaded: the range of {limits.name}; orange: subnormal)")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("share of the values")
        return figure
