"""The headroom in octaves before something overflows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loops.record import as_recorded
from loops.support.drawing import drawing
from loops.support.errors import LoopError
from loops.support.palette import BLUE, ORANGE, RED
from loops.views.plots.frame import curve, legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def headroom(run: Any) -> Figure:
    """How often values could double: gradients up to the critical scale, others up to the format's largest number.

    Args:
        run: A run, in any form that `loops.views.plots` takes.

    Raises:
        scaler.InvalidArgument: If `run` is not a run.
        LoopError: Without matplotlib, or if the headroom is unknown: it needs a trace with probes.
    """
    found = as_recorded(run)
    lines = {
        "activations, weights": (found.column("headroom"), ORANGE, "--"),
        "gradients, at the loss scale": (found.margin, BLUE, "-"),
    }
    if not any(np.isfinite(values).any() for values, *_ in lines.values()):
        raise LoopError(f"{found.name}: its headroom is not known. {' '.join(found.notes)}".rstrip())
    with drawing() as figure:
        axes = figure.subplots()
        axes.axhline(0, color=RED, linewidth=1.0)
        for label, (values, colour, dashes) in lines.items():
            finite = np.where(np.isfinite(values), values, np.nan)
            if not np.isnan(finite).all():
                curve(axes, found, finite, color=colour, linestyle=dashes, linewidth=1.3, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("octaves")
        legend(axes)
        return figure
