"""The curves of a report: loss, loss scale with its skips, and headroom."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from loops.record.columns import RETRIES
from loops.record.run import Recorded
from loops.record.summary import number
from loops.record.thin import moving_mean
from loops.record.thinned import lacks_steps
from loops.support.pages import Table
from loops.support.palette import CAUSES
from loops.support.part_names import columns_of
from loops.support.text import agreeing, amount
from loops.views.report.axes import Axis, linear_axis, loss_axis, octave_axis, steps_axis
from loops.views.report.chart import Chart, Curve, Lane, chart
from loops.views.report.tables import of_skips, of_steps

_SMOOTH = 50
"""The moving mean spans a run's length divided by this."""
_LINES = 6
"""The most runs in one figure: no more colours are distinct."""
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
    drawn: Chart | None
    said: str
    numbers: Sequence[tuple[str, Table]]


def loss_charts(run: Recorded, columns: int) -> list[Figure]:
    """The loss of each step, its moving mean, and where it was not finite, for each part of a composed step."""
    return [_loss_chart(run, part, name, columns) for part, name in columns_of(run.columns, "loss").items()]


def _loss_chart(run: Recorded, part: str, name: str, columns: int) -> Figure:
    loss, heading = run.column(name), f"Loss of {part}" if part else "Loss"
    x, mean = steps_axis(int(run.step[0]), int(run.step[-1])), moving_mean(loss, max(3, len(run) // _SMOOTH))
    y = loss_axis(loss)
    # Between its turns a part has no loss, which is NaN, as an infinite one is in a log of JSON.
    lost = ~np.isfinite(loss) & (np.isinf(loss) | (run.column(f"{part}/attempted") == 1) | (not part))
    smooth = len(run) >= 2 * _SMOOTH
    lines = [Curve("each step", _at(x, run), _finite(y, loss), "faint" if smooth else "blue")]
    if smooth:
        lines.append(Curve("moving mean", _at(x, run), _finite(y, mean), "blue"))
    lanes = [Lane(f"not finite: {_times(lost)}", _at(x, run)[lost], "pink")] if lost.any() else []
    finite = loss[np.isfinite(loss)]
    alt = f"{heading} over {amount(len(run), 'step')}, " + (
        f"from {finite[0]:.3g} to {finite[-1]:.3g}, at least {finite.min():.3g}"
        if len(finite)
        else "which is never finite"
    )
    alt += f"; not finite at {_times(lost)}." if lost.any() else "."
    said = f"The loss{f' of {part}' if part else ''}{_logarithmic(y)}.{_columns(run, columns)}"
    numbers = [("", of_steps(run, [("loss", loss), ("moving mean", mean)]))]
    return Figure(heading, chart(alt, y, x, lines, columns=columns, lanes=lanes), said, numbers)


def scale_chart(run: Recorded, columns: int) -> Figure | None:
    """The loss scale, the largest one that would have been finite, and each skip by its cause."""
    scale = run.column("loss_scale")
    if "loss_scale" not in run.columns:
        return None
    x, fits = steps_axis(int(run.step[0]), int(run.step[-1])), run.critical
    # A log of every tenth step says nothing of the others.
    step = "logged step" if lacks_steps(run.step.tolist()) else "step"
    # In float32 the critical scale may lie 100 octaves above the loss scale, which sets the axis.
    usual = scale[np.isfinite(scale) & (scale > 0)]
    near = fits[fits < 2.0**12 * float(usual.max(initial=1.0))]
    y = octave_axis(np.concatenate([usual, near]))
    lines = [Curve("loss scale", _at(x, run), y.of(scale), "blue", stairs=True)]
    if len(near):
        lines.insert(0, Curve("largest that would be finite", _at(x, run), y.of(fits), "faint"))
    lanes = [
        Lane(f"{cause}: {amount(len(steps), 'skip')}", x.of(steps), CAUSES.get(cause, "text"))
        for cause, steps in run.causes.items()
    ]
    counts = ", ".join(f"{len(steps):,} by {cause}" for cause, steps in run.causes.items())
    alt = f"Loss scale over {amount(len(run), 'step')}" + (
        f", from {number(float(usual[0]))} to {number(float(usual[-1]))}" if len(usual) else ""
    )
    skipped = int(run.skipped.sum())
    count = f"{amount(skipped, 'step')} {agreeing(skipped, 'was', 'were')} skipped: {counts}"
    alt += f"; {count if counts else f'no {step} was skipped'}."
    causes = [Markup("<b>{}</b>, {}").format(cause, _SAID.get(cause, "another cause")) for cause in run.causes]
    marks = Markup(" Below it a mark for each skipped step: {}.").format(Markup("; ").join(causes))
    shown = Markup("The loss scale, as a power of two.")
    still = is_constant(scale) and not counts and not len(near)
    if still:
        shown = Markup("The loss scale was {} at each {}.").format(number(float(usual[0])), step)
    said = shown + (marks if counts else f" No {step} was skipped.")
    retries = int(np.nansum(run.column(RETRIES)))
    if retries:
        said += f" {amount(retries, 'overflow')} {agreeing(retries, 'was', 'were')} retried at a lower scale."
    if len(near):
        said += " Grey is the largest power of two at which the step would have been finite."
    if still:
        return Figure("Loss scale and skips", None, said, [])
    numbers = [("", table) for table in (of_steps(run, [("loss scale", scale)]), *of_skips(run))]
    return Figure("Loss scale and skips", chart(alt, y, x, lines, columns=columns, lanes=lanes), said, numbers)


def is_constant(scale: np.ndarray) -> bool:
    """Whether each step is known to have had the same loss scale."""
    return bool(len(scale) and np.isfinite(scale[0]) and scale[0] > 0 and (scale == scale[0]).all())


def headroom_chart(run: Recorded, columns: int) -> Figure | None:
    """The headroom in octaves: gradients up to the critical scale, others up to the format's largest number."""
    gradients, others = run.margin, np.where(np.isposinf(run.column("headroom")), np.nan, run.column("headroom"))
    known = [values[np.isfinite(values)] for values in (gradients, others)]
    if not sum(map(len, known)):
        return None
    x = steps_axis(int(run.step[0]), int(run.step[-1]))
    y = linear_axis(np.concatenate([*known, [0.0]]), floor=-1.0)
    lines = []
    if len(known[1]):
        lines.append(Curve("activations, weights", _at(x, run), y.of(others), "orange dashed"))
    if len(known[0]):
        lines.append(Curve("gradients, at the loss scale", _at(x, run), y.of(gradients), "blue"))
    alt = f"Octaves of headroom over {amount(len(run), 'step')}"
    alt += f"; of the gradients at least {known[0].min():.3g}" if len(known[0]) else ""
    alt += f"; of activations and weights at least {known[1].min():.3g}" if len(known[1]) else ""
    said = (
        "How many times everything could double before a value becomes infinite. Gradients: log2 of the critical scale "
        f"over the loss scale{_below(gradients)}. Activations and weights: up to the largest number of their format."
    )
    numbers = [("", of_steps(run, [("gradients", gradients), ("activations, weights", others)]))]
    drawn = chart(f"{alt}.", y, x, lines, columns=columns, level=float(y.of(np.array(0.0))))
    return Figure("Headroom, in octaves", drawn, said, numbers)


def side_by_side(runs: Sequence[Recorded], columns: int) -> list[Figure]:
    """Loss and loss scale of several runs, each in one figure."""
    shown = [run for run in runs if "loss" in run.columns][:_LINES]
    x = steps_axis(min(int(run.step[0]) for run in runs), max(int(run.step[-1]) for run in runs))
    left_out = f" The first {_LINES} of {len(runs)} runs." if len(runs) > _LINES else ""
    parts = []
    if shown:
        means = [moving_mean(run.column("loss"), max(3, len(run) // _SMOOTH)) for run in shown]
        y = loss_axis(np.concatenate(means))
        lines = [
            Curve(run.name, _at(x, run), _finite(y, mean), f"run{place}")
            for place, (run, mean) in enumerate(zip(shown, means, strict=True))
        ]
        said = f"Moving means of the losses{_logarithmic(y)}.{left_out}"
        numbers = [
            (run.name, of_steps(run, [("moving mean of the loss", mean)]))
            for run, mean in zip(shown, means, strict=True)
        ]
        drawn = chart(f"Loss of {len(shown)} runs over their steps.", y, x, lines, columns=columns)
        parts.append(Figure("Loss, side by side", drawn, said, numbers))
    shown = [run for run in runs if "loss_scale" in run.columns][:_LINES]
    if shown:
        y = octave_axis(np.concatenate([run.column("loss_scale") for run in shown]))
        lines = [
            Curve(run.name, _at(x, run), y.of(run.column("loss_scale")), f"run{place}", stairs=True)
            for place, run in enumerate(shown)
        ]
        numbers = [(run.name, of_steps(run, [("loss scale", run.column("loss_scale"))])) for run in shown]
        drawn = chart(f"Loss scale of {len(shown)} runs over their steps.", y, x, lines, columns=columns)
        said = f"Where scales are equal, dashes lie on a line.{left_out}"
        parts.append(Figure("Loss scale, side by side", drawn, said, numbers))
    return parts


def _at(x: Axis, run: Recorded) -> np.ndarray:
    return x.of(run.step)


def _finite(y: Axis, values: np.ndarray) -> np.ndarray:
    return y.of(np.where(np.isfinite(values), values, math.nan))


def _logarithmic(y: Axis) -> str:
    return ", on a logarithmic axis" if y.log else ""


def _columns(run: Recorded, columns: int) -> str:
    if len(run) <= columns:
        return ""
    return f" The thin line reaches from the lowest to the highest of each {amount(round(len(run) / columns), 'step')}."


def _below(margin: np.ndarray) -> str:
    return f"; below 0 a step was not finite: {_times(margin < 0)}" if (margin < 0).any() else ""


def _times(where: np.ndarray) -> str:
    return amount(int(where.sum()), "step")
