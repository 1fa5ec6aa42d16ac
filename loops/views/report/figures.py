"""The curves of a report: each chart with its caption, and the numbers behind it.

A chart is paths of an SVG that stretches to any width, with labels outside it that keep their size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from loops.record.steps import RETRIES, Gauges, Recorded
from loops.record.summary import number
from loops.record.trace.visit_columns import noise_pairs, noise_scale
from loops.support.pages import Table
from loops.support.text import agreeing, amount
from loops.views import curves
from loops.views.chart import RUNS, Axis, Chart, Curve, Envelope, Lane, envelope, linear_axis, loss_axis, steps_axis
from loops.views.report.tables import of_skips, of_steps, scale_cell

_SAID = {
    "OVERFLOW": "the scaled gradients overflowed",
    "LOSS": "the loss was not finite",
    "BACKWARD": "derivatives are not finite at the scales tried",
    "UPDATE": "the optimizer made a value that is not finite",
    "TOO_LARGE": "the unscaled gradients were too large",
    "SPIKE": "the norm, the loss or the norm of one gradient was far beyond that of the steps before",
    "unknown": Markup(
        "the log does not say why (to learn more, have the step return <code>outcome.cause</code> as "
        "<code>cause</code>, and <code>outcome.variable</code> as <code>variable</code>)"
    ),
}
_FIGURES = {
    "attention_logit": (
        "Attention logits",
        "The largest magnitude of a logit of each attention layer. Logits that grow without bound go before many "
        "divergences of transformers.",
    ),
    "attention_entropy": (
        "Attention entropy, in nats",
        "The mean entropy of each layer's attention: 0 where each query sees one key alone. An entropy that falls to 0 "
        "goes before divergences, too.",
    ),
    "update_rms": (
        "Size of updates",
        "The root mean square of what a step added to a layer's weights. Skipped steps have none.",
    ),
    "update_ratio": (
        "Size of updates, relative to the weights",
        "The same over the root mean square of the weights before the step. About 0.001 is a usual rule of thumb.",
    ),
}
_NOISE = (
    "Gradient noise scale, in examples",
    "The simple noise scale, the ratio of two averages over about a hundred measured steps. Batches much smaller than "
    "it gain nearly all of each further example, larger ones little.",
)
_LOWEST_FIRST = ("attention_entropy",)
"""Outputs of which small values are those to look at."""
_SIZE = 1000
"""Units of an SVG in each direction. The SVG is stretched; the width of its lines is not."""
_EXACT = 1500
"""The most changes of a staircase that is drawn exactly."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of a report.

    Attributes:
        heading: The heading above the chart.
        drawn: The chart; None where it would show one value, which the caption says.
        said: The caption.
        numbers: The tables of its values, each with its heading; "" for no heading.
    """

    heading: str
    drawn: _Drawn | None
    said: str
    numbers: Sequence[tuple[str, Table]]


def loss_figures(run: Recorded, columns: int) -> list[Figure]:
    """The loss of each step, its moving mean, and where it was not finite, for each part of a composed step."""
    return [_loss_figure(one, columns) for one in curves.shown_of([run], "loss")]


def _loss_figure(one: curves.Shown, columns: int) -> Figure:
    chart, of = curves.loss_chart(one), f" of {one.part}" if one.part else ""
    said = f"The loss{of}{_logarithmic(chart.y)}.{_columns(one.run, columns)}"
    numbers = [("", of_steps(one.run.step, [("loss", one.values), ("moving mean", one.mean)]))]
    return Figure(f"Loss{of}", _drawn(chart, columns), said, numbers)


def scale_figure(run: Recorded, columns: int) -> Figure | None:
    """The loss scale, the largest one that would have been finite, and each skip by its cause."""
    if "loss_scale" not in run.columns:
        return None
    heading, scale = "Loss scale and skips", run.column("loss_scale")
    known = ~np.isnan(curves.near(run))
    none = f" No {curves.step_word(run)} was skipped."
    causes = [Markup("<b>{}</b>, {}").format(cause, _SAID.get(cause, "another cause")) for cause in run.causes]
    if curves.is_constant(scale) and not causes and not known.any():
        still = f"The loss scale was {number(float(scale[0]))} at each {curves.step_word(run)}."
        return Figure(heading, None, still + none + _retried(run), [])
    marks = Markup(" Below it a mark for each skipped step: {}.").format(Markup("; ").join(causes))
    said = Markup("The loss scale, as a power of two.") + (marks if causes else none) + _retried(run)
    if known.any():
        said += " Grey is the largest power of two at which the step would have been finite."
    if known.any() and not known.all():
        far = f"2^{math.log2(curves.NEAR):.0f} times the largest loss scale"
        said += f" Where it is missing it is not known, or beyond {far}."
    numbers = [("", table) for table in (of_steps(run.step, [("loss scale", scale)], scale_cell), *of_skips(run))]
    return Figure(heading, _drawn(curves.scale_chart(run), columns), said, numbers)


def part_scale_figures(run: Recorded, columns: int) -> list[Figure]:
    """The loss scale of each part of a composed step, with the steps that it skipped; none for a step of one loss."""
    shown = curves.shown_of([run], "loss_scale")
    return [_part_figure(one, columns) for one in shown if one.part and (one.values > 0).any()]


def _part_figure(one: curves.Shown, columns: int) -> Figure:
    scale, skips = one.values, len(one.skipped)
    heading = f"Loss scale of {one.part}"
    if curves.is_constant(scale) and not skips:
        said = f"The loss scale of {one.part} was {number(float(scale[0]))} at each step. No step was skipped."
        return Figure(heading, None, said, [])
    said = f"The loss scale of {one.part}, as a power of two."
    said += " Below it a mark for each step that it skipped." if skips else ""
    numbers = [("", of_steps(one.run.step, [("loss scale", scale)], scale_cell))]
    return Figure(heading, _drawn(curves.part_chart(one), columns), said, numbers)


def headroom_figure(run: Recorded, columns: int) -> Figure | None:
    """The headroom in octaves: gradients up to the critical scale, others up to the format's largest number."""
    chart = curves.headroom_chart(run)
    if chart is None:
        return None
    below = int((run.margin < 0).sum())
    lost = f"; below 0 a step was not finite: {amount(below, 'step')}" if below else ""
    said = (
        "How many times everything could double before a value becomes infinite. Gradients: log2 of the critical scale "
        f"over the loss scale{lost}. Activations and weights: up to the largest number of their format."
    )
    numbers = [("", of_steps(run.step, [("gradients", run.margin), ("activations, weights", curves.others_of(run))]))]
    return Figure("Headroom, in octaves", _drawn(chart, columns), said, numbers)


def side_by_side(runs: Sequence[Recorded], columns: int) -> list[Figure]:
    """Loss and loss scale of several runs, each in one figure."""
    found = []
    shown, left_out = _fitting(curves.shown_of(runs, "loss"))
    if shown:
        chart = curves.losses_chart(shown)
        said = f"Moving means of the losses{_logarithmic(chart.y)}.{left_out}"
        numbers = [(one.label, of_steps(one.run.step, [("moving mean of the loss", one.mean)])) for one in shown]
        found.append(Figure("Loss, side by side", _drawn(chart, columns), said, numbers))
    shown, left_out = _fitting(curves.shown_of(runs, "loss_scale"))
    if shown:
        said = f"Where scales are equal, dashes lie on a line.{left_out}"
        numbers = [(one.label, of_steps(one.run.step, [("loss scale", one.values)], scale_cell)) for one in shown]
        found.append(Figure("Loss scale, side by side", _drawn(curves.scales_chart(shown), columns), said, numbers))
    return found


def _fitting(every: list[curves.Shown]) -> tuple[list[curves.Shown], str]:
    """What fits one chart, and a sentence about what does not."""
    return every[:RUNS], f" The first {RUNS} of {len(every)} are shown." if len(every) > RUNS else ""


def _retried(run: Recorded) -> str:
    retries = int(np.nansum(run.column(RETRIES)))
    if not retries:
        return ""
    return f" {amount(retries, 'overflow')} {agreeing(retries, 'was', 'were')} retried at a lower scale."


def _logarithmic(y: Axis) -> str:
    return ", on a logarithmic axis" if y.log else ""


def _columns(run: Recorded, columns: int) -> str:
    if len(run) <= columns:
        return ""
    return f" The thin line reaches from the lowest to the highest of each {amount(round(len(run) / columns), 'step')}."


def gauge_figures(run: Recorded, columns: int) -> list[Figure]:
    """The figures of what a run's ready probes measured; none without any."""
    if run.gauges is None:
        return []
    found = [_figure(output, *said, run.gauges.of(output), columns) for output, said in _FIGURES.items()]
    names, scales = run.gauges.names, {}
    for name, noise, signal in noise_pairs(names):
        parts = [run.gauges.values[:, names.index(one)] for one in (noise, signal)]
        scales[name.partition("/")[2] or "noise scale"] = np.where(np.isfinite(parts[0]), noise_scale(*parts), np.nan)
    if scales:
        values = np.stack(list(scales.values()), axis=1)
        found.append(_figure("noise_scale", *_NOISE, Gauges(run.gauges.step, tuple(scales), values), columns))
    return [figure for figure in found if figure is not None]


def evaluation_figures(run: Recorded, columns: int) -> list[Figure]:
    """A figure for each metric of the run's evaluated checkpoints, over the steps of the training curves."""
    if run.evaluations is None:
        return []
    own, said = run.evaluations, "Measured by hs.Evaluate, or at checkpoints by hs.evaluate_checkpoints."
    said += f" The first {RUNS} of {len(own.names)} metrics are shown." if len(own.names) > RUNS else ""
    step = np.union1d(own.step, run.step[[0, -1]])
    values = np.full((len(step), len(own.names)), np.nan)
    values[np.searchsorted(step, own.step)] = own.values
    each = [(name, Gauges(step, (name,), values[:, [place]])) for place, name in enumerate(own.names[:RUNS])]
    found = [_figure(name, f"Evaluation: {name}", said, one, columns) for name, one in each]
    return [figure for figure in found if figure is not None]


def _figure(output: str, heading: str, said: str, gauges: Gauges, columns: int) -> Figure | None:
    known = np.isfinite(gauges.values).any(axis=1)
    if not known.any():
        return None
    step, values = gauges.step[known], np.where(np.isfinite(gauges.values), gauges.values, np.nan)[known]
    with np.errstate(all="ignore"):
        means = np.array([np.nanmean(column) if np.isfinite(column).any() else np.nan for column in values.T])
    order = np.argsort(means if output in _LOWEST_FIRST else -means, kind="stable")[: min(RUNS, len(means))]
    if len(means) > RUNS:
        which = "lowest" if output in _LOWEST_FIRST else "highest"
        said += f" The {RUNS} of {amount(len(means), 'layer')} with the {which} mean."
    places = sorted(place for place in order.tolist() if np.isfinite(means[place]))
    shown, names = values[:, places], [gauges.names[place] for place in places]
    y = loss_axis(shown) if (shown[np.isfinite(shown)] > 0).all() else linear_axis(shown)
    pairs = list(zip(names, shown.T, strict=True))
    drawn = [Curve(name, step, column, f"run{place}") for place, (name, column) in enumerate(pairs)]
    finite = shown[np.isfinite(shown)]
    alt = f"{heading} over {amount(len(step), 'measured step')}, from {finite.min():.3g} to {finite.max():.3g}."
    if y.log:
        said += " The axis is logarithmic."
    chart = Chart(alt, heading, int(gauges.step[0]), int(gauges.step[-1]), y, drawn)
    numbers = of_steps(step, pairs, kind="measured step")
    return Figure(heading, _drawn(chart, columns), said, [("", numbers)])


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """What `page.html` draws.

    Attributes:
        alt: What it shows, in words.
        x: The axis of the steps.
        y: The axis of the values.
        grid: The SVG path of the grid lines.
        level: The SVG path of a horizontal line; "" for none.
        lines: The look, label and SVG path of each curve, drawn in this order.
        lanes: The look, label and SVG path of each strip below.
    """

    alt: str
    x: Axis
    y: Axis
    grid: str
    level: str
    lines: tuple[tuple[str, str, str], ...]
    lanes: tuple[tuple[str, str, str], ...]

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """The lines to name: none if there is only one."""
        named = [line for line in self.lines if line[1]]
        return named if len(named) > 1 else []


def _drawn(chart: Chart, columns: int) -> _Drawn:
    """The paths of a chart.

    Args:
        chart: The chart.
        columns: The most points of a curve; a longer one keeps the extremes of each column. Marks of steps in the same
            column are one.
    """
    x, y = steps_axis(chart.first, chart.last), chart.y
    level = "" if chart.level is None else f"M0 {_across(float(y.of(np.array(chart.level))))}H{_SIZE}"
    return _Drawn(
        chart.alt,
        x,
        y,
        "".join(f"M0 {_across(place)}H{_SIZE}" for place, _ in y.ticks),
        level,
        tuple((curve.look, curve.label, _path(curve, x, y, columns)) for curve in chart.curves),
        tuple((lane.look, lane.label, _marks(lane, x, columns)) for lane in chart.lanes),
    )


def _marks(lane: Lane, axis: Axis, columns: int) -> str:
    # Each mark is at least as wide as a column, so none is lost between them.
    places = np.unique((axis.of(lane.step) * columns).astype(np.int64))
    return "".join(f"M{round(_SIZE * place / columns, 1):g} 0V10" for place in places.tolist())


def _path(curve: Curve, along: Axis, across: Axis, columns: int) -> str:
    x, y = along.of(curve.step), across.of(curve.values)
    if curve.stairs:
        changes = np.flatnonzero(np.diff(np.nan_to_num(y, nan=-1.0), prepend=np.nan))
        if len(changes) <= max(_EXACT * columns // 600, 2):
            return _staircase(x, y, changes)
    found = envelope(x, y, columns)
    return _zigzag(found) if len(found.x) else ""


def _staircase(x: np.ndarray, y: np.ndarray, changes: np.ndarray) -> str:
    parts, down = [], True
    for place in changes.tolist():
        at, value = _along(x[place]), y[place]
        if np.isnan(value):
            parts.append("" if down else f"H{at}")
            down = True
        else:
            parts.append(f"M{at} {_across(value)}" if down else f"H{at}V{_across(value)}")
            down = False
    return "".join(parts) + ("" if down or not parts else f"H{_along(x[-1])}")


def _zigzag(found: Envelope) -> str:
    parts = []
    ends = [*found.broken[1:].tolist(), True]
    columns = zip(*(column.tolist() for column in found), ends, strict=True)
    for place, (at, low, high, broken, last) in enumerate(columns):
        begins = broken or not place
        first, second = (low, high) if place % 2 else (high, low)
        parts.append(f"{'M' if begins else 'L'}{_along(at)} {_across(first)}")
        if high > low:
            parts.append(f"V{_across(second)}")
        elif begins and last:  # A single point would be invisible.
            parts.append(f"h{_SIZE / 100 if len(ends) == 1 else _SIZE / 500:g}")
    return "".join(parts)


def _along(place: float) -> str:
    return f"{_SIZE * place:.1f}".removesuffix(".0")


def _across(place: float) -> str:
    return f"{_SIZE * (1 - place):.0f}"
