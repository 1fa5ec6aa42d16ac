"""Charts of loss scales, with each skip."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loops.record.skips import lacks_steps
from loops.record.steps import Recorded
from loops.record.summary import number
from loops.support.palette import CAUSES
from loops.support.text import agreeing, amount
from loops.views.charts.axis import octave_axis
from loops.views.charts.chart import Chart, Curve, Lane, ends, lanes

NEAR = 2.0**12
"""The factor above the loss scale up to which the critical scale is drawn: in float32 it lies 100 octaves above."""
_QUANTITY = "loss scale"


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
    return Chart(alt, _QUANTITY, *ends(run), octave_axis(np.concatenate([usual, known])), curves, marks)


def near(run: Recorded) -> np.ndarray:
    """The critical scales that lie near the loss scale, float64 [steps]; NaN for others and where none is known."""
    scale, fits = run.column("loss_scale"), run.critical
    usual = scale[np.isfinite(scale) & (scale > 0)]
    # A float of Python becomes infinite without a warning.
    return np.where(fits < NEAR * float(usual.max(initial=1.0)), fits, np.nan)


def part_chart(run: Recorded, part: str, name: str) -> Chart:
    """The loss scale of a part of a composed step, and the steps that it skipped."""
    scale, skipped = run.column(name), skipped_by(run, part)
    usual = scale[np.isfinite(scale) & (scale > 0)]
    times = amount(len(skipped), "step")
    alt = f"Loss scale of {part} over {amount(len(run), 'step')}, {_course(usual)}"
    alt += f"; skipped at {times}." if len(skipped) else "; no step was skipped."
    curve = Curve(_QUANTITY, run.step, scale, "blue", stairs=True)
    return Chart(
        alt, _QUANTITY, *ends(run), octave_axis(usual), [curve], lanes(Lane(f"skipped: {times}", skipped, "pink"))
    )


def scales_chart(shown: Sequence[tuple[str, Recorded, str, str]]) -> Chart:
    """Several loss scales, and the steps that each skipped.

    Args:
        shown: For each its label, run, part ("" for a step of one loss) and column.
    """
    curves, marks = [], []
    for place, (label, run, part, name) in enumerate(shown):
        skipped = skipped_by(run, part)
        curves.append(Curve(label, run.step, run.column(name), f"run{place}", stairs=True))
        marks.append(Lane(f"{label}: {amount(len(skipped), 'skip')}", skipped, f"run{place}"))
    alt = f"Loss scale of {', '.join(label for label, *_ in shown)} over their steps."
    y = octave_axis(np.concatenate([curve.values for curve in curves]))
    return Chart(alt, _QUANTITY, *ends(*(run for _, run, *_ in shown)), y, curves, lanes(*marks))


def skipped_by(run: Recorded, part: str) -> np.ndarray:
    """The steps that a part attempted and did not apply, or the step itself with "": int64."""
    if not part:
        return run.step[run.skipped]
    # A part that was not attempted waited for its turn, or for the end of its window.
    return run.step[(run.column(f"{part}/applied") == 0) & (run.column(f"{part}/attempted") == 1)]


def is_constant(scale: np.ndarray) -> bool:
    """Whether each step is known to have had the same loss scale."""
    return bool(len(scale) and np.isfinite(scale[0]) and scale[0] > 0 and (scale == scale[0]).all())


def step_word(run: Recorded) -> str:
    """What its rows are: a log of every tenth step says nothing of the others."""
    return "logged step" if lacks_steps(run.step.tolist()) else "step"


def _course(usual: np.ndarray) -> str:
    return f"from {number(float(usual[0]))} to {number(float(usual[-1]))}"
