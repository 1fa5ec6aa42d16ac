"""The chart of headroom, in octaves."""

from __future__ import annotations

import numpy as np

from loops.record.steps import Recorded
from loops.support.text import amount
from loops.views.charts.axis import linear_axis
from loops.views.charts.chart import Chart, Curve, ends


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
    return Chart(f"{alt}.", "octaves", *ends(run), y, curves, level=0.0)


def others_of(run: Recorded) -> np.ndarray:
    """The headroom of activations and weights, float64 [steps]; NaN where it is not known or without end."""
    return np.where(np.isposinf(run.column("headroom")), np.nan, run.column("headroom"))
