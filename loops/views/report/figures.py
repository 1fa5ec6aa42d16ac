"""The curves of a report: each chart with its caption, and the numbers behind it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from loops.record.columns import RETRIES
from loops.record.run import Recorded
from loops.record.summary import number
from loops.support.pages import Table
from loops.support.part_names import columns_of, named
from loops.support.text import agreeing, amount
from loops.views.charts.axis import Axis
from loops.views.charts.chart import RUNS
from loops.views.charts.headroom import headroom_chart, others_of
from loops.views.charts.losses import loss_chart, losses_chart, smoothed
from loops.views.charts.scales import (
    NEAR,
    is_constant,
    near,
    part_chart,
    scale_chart,
    scales_chart,
    skipped_by,
    step_word,
)
from loops.views.report.drawn import Drawn, drawn
from loops.views.report.tables import of_skips, of_steps

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
    drawn: Drawn | None
    said: str
    numbers: Sequence[tuple[str, Table]]


def loss_figures(run: Recorded, columns: int) -> list[Figure]:
    """The loss of each step, its moving mean, and where it was not finite, for each part of a composed step."""
    return [_loss_figure(run, part, name, columns) for part, name in columns_of(run.columns, "loss").items()]


def _loss_figure(run: Recorded, part: str, name: str, columns: int) -> Figure:
    loss, chart, of = run.column(name), loss_chart(run, part, name), f" of {part}" if part else ""
    said = f"The loss{of}{_logarithmic(chart.y)}.{_columns(run, columns)}"
    numbers = [("", of_steps(run, [("loss", loss), ("moving mean", smoothed(run, loss))]))]
    return Figure(f"Loss{of}", drawn(chart, columns), said, numbers)


def scale_figure(run: Recorded, columns: int) -> Figure | None:
    """The loss scale, the largest one that would have been finite, and each skip by its cause."""
    if "loss_scale" not in run.columns:
        return None
    heading, scale = "Loss scale and skips", run.column("loss_scale")
    known = ~np.isnan(near(run))
    none = f" No {step_word(run)} was skipped."
    causes = [Markup("<b>{}</b>, {}").format(cause, _SAID.get(cause, "another cause")) for cause in run.causes]
    if is_constant(scale) and not causes and not known.any():
        still = f"The loss scale was {number(float(scale[0]))} at each {step_word(run)}."
        return Figure(heading, None, still + none + _retried(run), [])
    marks = Markup(" Below it a mark for each skipped step: {}.").format(Markup("; ").join(causes))
    said = Markup("The loss scale, as a power of two.") + (marks if causes else none) + _retried(run)
    if known.any():
        said += " Grey is the largest power of two at which the step would have been finite."
    if known.any() and not known.all():
        said += f" Where it is missing it is not known, or beyond 2^{math.log2(NEAR):.0f} times the largest loss scale."
    numbers = [("", table) for table in (of_steps(run, [("loss scale", scale)]), *of_skips(run))]
    return Figure(heading, drawn(scale_chart(run), columns), said, numbers)


def part_scale_figures(run: Recorded, columns: int) -> list[Figure]:
    """The loss scale of each part of a composed step, with the steps that it skipped; none for a step of one loss."""
    return [
        _part_figure(run, part, name, columns)
        for part, name in columns_of(run.columns, "loss_scale").items()
        if part and (run.column(name) > 0).any()
    ]


def _part_figure(run: Recorded, part: str, name: str, columns: int) -> Figure:
    scale, skips = run.column(name), len(skipped_by(run, part))
    heading = f"Loss scale of {part}"
    if is_constant(scale) and not skips:
        said = f"The loss scale of {part} was {number(float(scale[0]))} at each step. No step was skipped."
        return Figure(heading, None, said, [])
    said = f"The loss scale of {part}, as a power of two."
    said += " Below it a mark for each step that it skipped." if skips else ""
    numbers = [("", of_steps(run, [("loss scale", scale)]))]
    return Figure(heading, drawn(part_chart(run, part, name), columns), said, numbers)


def headroom_figure(run: Recorded, columns: int) -> Figure | None:
    """The headroom in octaves: gradients up to the critical scale, others up to the format's largest number."""
    chart = headroom_chart(run)
    if chart is None:
        return None
    said = (
        "How many times everything could double before a value becomes infinite. Gradients: log2 of the critical scale "
        f"over the loss scale{_below(run.margin)}. Activations and weights: up to the largest number of their format."
    )
    numbers = [("", of_steps(run, [("gradients", run.margin), ("activations, weights", others_of(run))]))]
    return Figure("Headroom, in octaves", drawn(chart, columns), said, numbers)


def side_by_side(runs: Sequence[Recorded], columns: int) -> list[Figure]:
    """Loss and loss scale of several runs, each in one figure."""
    found = []
    shown, left_out = _shown(runs, "loss")
    if shown:
        chart = losses_chart(shown)
        said = f"Moving means of the losses{_logarithmic(chart.y)}.{left_out}"
        numbers = [
            (label, of_steps(run, [("moving mean of the loss", smoothed(run, run.column(name)))]))
            for label, run, _, name in shown
        ]
        found.append(Figure("Loss, side by side", drawn(chart, columns), said, numbers))
    shown, left_out = _shown(runs, "loss_scale")
    if shown:
        chart = scales_chart(shown)
        said = f"Where scales are equal, dashes lie on a line.{left_out}"
        numbers = [(label, of_steps(run, [("loss scale", run.column(name))])) for label, run, _, name in shown]
        found.append(Figure("Loss scale, side by side", drawn(chart, columns), said, numbers))
    return found


def _shown(runs: Sequence[Recorded], column: str) -> tuple[list[tuple[str, Recorded, str, str]], str]:
    """What fits one chart, and a sentence about what does not."""
    every = [
        (named(run.name, part), run, part, name)
        for run in runs
        for part, name in columns_of(run.columns, column).items()
    ]
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


def _below(margin: np.ndarray) -> str:
    below = int((margin < 0).sum())
    return f"; below 0 a step was not finite: {amount(below, 'step')}" if below else ""
