"""Charts of losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loops.record.steps import Recorded
from loops.support.part_names import named
from loops.support.text import amount
from loops.views.charts.axis import loss_axis
from loops.views.charts.chart import Chart, Curve, Lane, ends, lanes, moving_mean

_SMOOTH = 50
"""The moving mean spans a run's length divided by this."""


def smoothed(run: Recorded, loss: np.ndarray) -> np.ndarray:
    """The moving mean of a loss, float64 [steps]."""
    return moving_mean(loss, max(3, len(run) // _SMOOTH))


def loss_chart(run: Recorded, part: str, name: str) -> Chart:
    """A loss at each step, its moving mean, and where it was not finite.

    Args:
        run: The run.
        part: The part of a composed step whose loss it is; "" for a step of one loss.
        name: The column.
    """
    loss, heading = run.column(name), named("loss", part)
    lost = _lost(run, part, loss)
    smooth = len(run) >= 2 * _SMOOTH
    curves = [Curve("each step", run.step, _finite(loss), "faint" if smooth else "blue")]
    if smooth:
        curves.append(Curve("moving mean", run.step, smoothed(run, loss), "blue"))
    alt = f"Loss{f' of {part}' if part else ''} over {amount(len(run), 'step')}, {_course(loss)}"
    alt += f"; not finite at {amount(len(lost), 'step')}." if len(lost) else "."
    marks = lanes(Lane(f"not finite: {amount(len(lost), 'step')}", lost, "pink"))
    return Chart(alt, heading, *ends(run), loss_axis(loss), curves, marks)


def losses_chart(shown: Sequence[tuple[str, Recorded, str, str]]) -> Chart:
    """The moving means of several losses, and where each was not finite.

    Args:
        shown: For each its label, run, part and column; at most `RUNS` of them.
    """
    means = [smoothed(run, run.column(name)) for _, run, _, name in shown]
    curves, marks = [], []
    for place, ((label, run, part, name), mean) in enumerate(zip(shown, means, strict=True)):
        lost = _lost(run, part, run.column(name))
        curves.append(Curve(label, run.step, mean, f"run{place}"))
        marks.append(Lane(f"{label} not finite: {amount(len(lost), 'step')}", lost, f"run{place}"))
    alt = f"Loss of {', '.join(label for label, *_ in shown)} over their steps."
    runs = [run for _, run, *_ in shown]
    return Chart(alt, "loss", *ends(*runs), loss_axis(np.concatenate(means)), curves, lanes(*marks))


def _lost(run: Recorded, part: str, loss: np.ndarray) -> np.ndarray:
    """The steps whose loss is not finite."""
    # Between its turns a part has no loss, which is NaN, as an infinite one is in a log of JSON.
    turn = (run.column(f"{part}/attempted") == 1) | (not part)
    return run.step[~np.isfinite(loss) & (np.isinf(loss) | turn)]


def _course(loss: np.ndarray) -> str:
    finite = loss[np.isfinite(loss)]
    if not len(finite):
        return "which is never finite"
    return f"from {finite[0]:.3g} to {finite[-1]:.3g}, at least {finite.min():.3g}"


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)
