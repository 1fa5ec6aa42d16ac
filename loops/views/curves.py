"""The charts of runs over their steps: losses, loss scales with each skip, and headroom in octaves.

`report` draws them as SVG that a page stretches, `plots` as figures of matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loops.record.skips import lacks_steps
from loops.record.steps import Recorded
from loops.record.summary import number
from loops.support.palette import CAUSES
from loops.support.part_names import columns_of, named
from loops.support.text import agreeing, amount
from loops.views.chart import Axis, Chart, Curve, Lane, linear_axis, loss_axis, moving_mean, octave_axis

_SMOOTH = 50
"""The moving mean spans a run's length divided by this."""
NEAR = 2.0**12
"""The factor above the loss scale up to which the critical scale is drawn: in float32 it lies 100 octaves above."""
_QUANTITY = "loss scale"


class Shown(NamedTuple):
    """A loss or a loss scale in a chart: that of a run, or of a part of a composed step.

    Attributes:
        label: For the legend.
        run: The run.
        part: The part; "" for a step of one loss.
        name: The column.
    """

    label: str
    run: Recorded
    part: str
    name: str

    @property
    def values(self) -> np.ndarray:
        """Float64 [steps]."""
        return self.run.column(self.name)

    @property
    def mean(self) -> np.ndarray:
        """The moving mean of a loss, float64 [steps]."""
        return moving_mean(self.values, max(3, len(self.run) // _SMOOTH))

    @property
    def lost(self) -> np.ndarray:
        """The steps whose loss is not finite."""
        # Between its turns a part has no loss, which is NaN, as an infinite one is in a log of JSON.
        turn = (self.run.column(f"{self.part}/attempted") == 1) | (not self.part)
        return self.run.step[~np.isfinite(self.values) & (np.isinf(self.values) | turn)]

    @property
    def skipped(self) -> np.ndarray:
        """The steps that it attempted and did not apply: int64."""
        if not self.part:
            return self.run.step[self.run.skipped]
        # A part that was not attempted waited for its turn, or for the end of its window.
        attempted, applied = (self.run.column(f"{self.part}/{name}") for name in ("attempted", "applied"))
        return self.run.step[(applied == 0) & (attempted == 1)]


def shown_of(runs: Sequence[Recorded], column: str) -> list[Shown]:
    """The columns of one meaning, "loss" or "loss_scale", of all runs and of their parts."""
    return [
        Shown(part if len(runs) == 1 else named(run.name, part), run, part, name)
        for run in runs
        for part, name in columns_of(run.columns, column).items()
    ]


def loss_chart(shown: Shown) -> Chart:
    """A loss at each step, its moving mean, and where it was not finite."""
    _, run, part, _ = shown
    loss, lost, smooth = shown.values, shown.lost, len(run) >= 2 * _SMOOTH
    curves = [Curve("each step", run.step, np.where(np.isfinite(loss), loss, np.nan), "faint" if smooth else "blue")]
    if smooth:
        curves.append(Curve("moving mean", run.step, shown.mean, "blue"))
    alt = f"Loss{f' of {part}' if part else ''} over {amount(len(run), 'step')}, {_course_of_loss(loss)}"
    alt += f"; not finite at {amount(len(lost), 'step')}." if len(lost) else "."
    marks = [Lane(f"not finite: {amount(len(lost), 'step')}", lost, "pink")]
    return _chart(alt, named("loss", part), [run], loss_axis(loss), curves, marks)


def losses_chart(shown: Sequence[Shown]) -> Chart:
    """The moving means of several losses, at most `RUNS`, and where each was not finite."""
    curves = [Curve(one.label, one.run.step, one.mean, f"run{place}") for place, one in enumerate(shown)]
    marks = [
        Lane(f"{one.label} not finite: {amount(len(one.lost), 'step')}", one.lost, f"run{place}")
        for place, one in enumerate(shown)
    ]
    alt = f"Loss of {', '.join(one.label for one in shown)} over their steps."
    y = loss_axis(np.concatenate([curve.values for curve in curves]))
    return _chart(alt, "loss", [one.run for one in shown], y, curves, marks)


def _course_of_loss(loss: np.ndarray) -> str:
    finite = loss[np.isfinite(loss)]
    if not len(finite):
        return "which is never finite"
    return f"from {finite[0]:.3g} to {finite[-1]:.3g}, at least {finite.min():.3g}"


def scale_chart(run: Recorded) -> Chart:
    """The loss scale, the largest one that would have been finite, and each skip by its cause."""
    scale = run.column("loss_scale")
    usual, fits = scale[np.isfinite(scale) & (scale > 0)], near(run)
    known = fits[~np.isnan(fits)]
    curves = [Curve(_QUANTITY, run.step, scale, "blue", stairs=True)]
    if len(known):
        curves.insert(0, Curve("largest that would be finite", run.step, fits, "faint"))
    marks = [
        Lane(f"{cause}: {amount(len(steps), 'skip')}", steps, CAUSES.get(cause, "text"))
        for cause, steps in run.causes.items()
    ]
    counts = ", ".join(f"{len(steps):,} by {cause}" for cause, steps in run.causes.items())
    skipped = int(run.skipped.sum())
    alt = f"Loss scale over {amount(len(run), 'step')}" + (f", {_course(usual)}" if len(usual) else "")
    count = f"{amount(skipped, 'step')} {agreeing(skipped, 'was', 'were')} skipped: {counts}"
    alt += f"; {count if counts else f'no {step_word(run)} was skipped'}."
    return _chart(alt, _QUANTITY, [run], octave_axis(np.concatenate([usual, known])), curves, marks)


def near(run: Recorded) -> np.ndarray:
    """The critical scales that lie near the loss scale, float64 [steps]; NaN for others and where none is known."""
    scale, fits = run.column("loss_scale"), run.critical
    usual = scale[np.isfinite(scale) & (scale > 0)]
    # A float of Python becomes infinite without a warning.
    return np.where(fits < NEAR * float(usual.max(initial=1.0)), fits, np.nan)


def part_chart(shown: Shown) -> Chart:
    """The loss scale of a part of a composed step, and the steps that it skipped."""
    run, scale, skipped = shown.run, shown.values, shown.skipped
    usual = scale[np.isfinite(scale) & (scale > 0)]
    times = amount(len(skipped), "step")
    alt = f"Loss scale of {shown.part} over {amount(len(run), 'step')}, {_course(usual)}"
    alt += f"; skipped at {times}." if len(skipped) else "; no step was skipped."
    curve = Curve(_QUANTITY, run.step, scale, "blue", stairs=True)
    return _chart(alt, _QUANTITY, [run], octave_axis(usual), [curve], [Lane(f"skipped: {times}", skipped, "pink")])


def scales_chart(shown: Sequence[Shown]) -> Chart:
    """Several loss scales, and the steps that each skipped."""
    curves, marks = [], []
    for place, one in enumerate(shown):
        curves.append(Curve(one.label, one.run.step, one.values, f"run{place}", stairs=True))
        marks.append(Lane(f"{one.label}: {amount(len(one.skipped), 'skip')}", one.skipped, f"run{place}"))
    alt = f"Loss scale of {', '.join(one.label for one in shown)} over their steps."
    y = octave_axis(np.concatenate([curve.values for curve in curves]))
    return _chart(alt, _QUANTITY, [one.run for one in shown], y, curves, marks)


def is_constant(scale: np.ndarray) -> bool:
    """Whether each step is known to have had the same loss scale."""
    return bool(len(scale) and np.isfinite(scale[0]) and scale[0] > 0 and (scale == scale[0]).all())


def step_word(run: Recorded) -> str:
    """What its rows are: a log of every tenth step says nothing of the others."""
    return "logged step" if lacks_steps(run.step.tolist()) else "step"


def _course(usual: np.ndarray) -> str:
    return f"from {number(float(usual[0]))} to {number(float(usual[-1]))}"


def headroom_chart(run: Recorded) -> Chart | None:
    """How often values could double: gradients up to the critical scale, others up to the format's largest number.

    None if the run does not know it.
    """
    gradients, others = run.margin, others_of(run)
    known = [values[np.isfinite(values)] for values in (gradients, others)]
    if not sum(map(len, known)):
        return None
    curves = []
    if len(known[1]):
        curves.append(Curve("activations, weights", run.step, others, "orange dashed"))
    if len(known[0]):
        curves.append(Curve("gradients, at the loss scale", run.step, gradients, "blue"))
    alt = f"Octaves of headroom over {amount(len(run), 'step')}"
    alt += f"; of the gradients at least {known[0].min():.3g}" if len(known[0]) else ""
    alt += f"; of activations and weights at least {known[1].min():.3g}" if len(known[1]) else ""
    y = linear_axis(np.concatenate([*known, [0.0]]), floor=-1.0)
    return _chart(f"{alt}.", "octaves", [run], y, curves, level=0.0)


def others_of(run: Recorded) -> np.ndarray:
    """The headroom of activations and weights, float64 [steps]; NaN where it is not known or without end."""
    return np.where(np.isposinf(run.column("headroom")), np.nan, run.column("headroom"))


def _chart(
    alt: str,
    quantity: str,
    runs: Sequence[Recorded],
    y: Axis,
    curves: Sequence[Curve],
    marks: Sequence[Lane] = (),
    level: float | None = None,
) -> Chart:
    """A chart over all steps of some runs, with those lanes that have a mark."""
    first, last = min(int(run.step[0]) for run in runs), max(int(run.step[-1]) for run in runs)
    return Chart(alt, quantity, first, last, y, curves, [lane for lane in marks if len(lane.step)], level)
