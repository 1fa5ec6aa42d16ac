"""The loss scale over the steps, with each skip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from loops.record import as_recorded
from loops.record.run import Recorded
from loops.support.drawing import drawing
from loops.support.palette import BLACK, BLUE, BY_NAME, CAUSES, FAINT, SERIES
from loops.support.part_names import columns_of
from loops.views.plots.frame import curve, legend, needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = {"OVERFLOW": "x", "LOSS": "+", "BACKWARD": "1", "UPDATE": "2", "TOO_LARGE": "3", "SPIKE": "^"}
_NEAR = 2.0**12
"""The factor above the loss scale up to which the critical scale is drawn: in float32 it lies 100 octaves above."""


def loss_scale(run: Any) -> Figure:
    """The loss scale, the largest one that would have been finite, and a mark for each skip, by its cause.

    Of a composed step it draws the scale of each part, and a mark where that part was skipped.

    Args:
        run: A run, in any form that `loops.views.plots` takes.

    Raises:
        scaler.InvalidArgument: If `run` is not a run.
        LoopError: Without matplotlib, or if the run has no loss scale.
    """
    found = as_recorded(run)
    parts = columns_of(found.columns, "loss_scale")
    if parts and "" not in parts:
        return _of_parts(found, parts)
    needs(found, "loss_scale")
    scale, fits = found.column("loss_scale"), found.critical
    with drawing() as figure:
        axes = figure.subplots()
        if (fits < _NEAR * np.nanmax(scale)).any():
            fits = np.where(fits < _NEAR * np.nanmax(scale), fits, np.nan)
            curve(axes, found, fits, color=FAINT, linewidth=1.0, label="largest that would be finite")
        curve(axes, found, scale, color=BLUE, linewidth=1.4, drawstyle="steps-post", label="loss scale")
        for cause, steps in found.causes.items():
            colour, marker = BY_NAME.get(CAUSES.get(cause, ""), BLACK), _MARKERS.get(cause, "|")
            at = scale[np.searchsorted(found.step, steps)]
            mark: Any = {"color": colour, "markersize": 7, "markeredgewidth": 1.5, "clip_on": False}
            axes.plot(steps, at, marker, label=f"skipped: {cause} ({len(steps)})", **mark)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("step")
        axes.set_ylabel("loss scale")
        legend(axes)
        return figure


def _of_parts(found: Recorded, parts: Mapping[str, str]) -> Figure:
    with drawing() as figure:
        axes = figure.subplots()
        for number, (part, name) in enumerate(parts.items()):
            scale, colour = found.column(name), SERIES[number % len(SERIES)]
            curve(axes, found, scale, color=colour, linewidth=1.4, drawstyle="steps-post", label=part)
            skipped = (found.column(f"{part}/applied") == 0) & (found.column(f"{part}/attempted") == 1)
            if skipped.any():
                mark: Any = {"color": colour, "markersize": 7, "markeredgewidth": 1.5, "clip_on": False}
                axes.plot(found.step[skipped], scale[skipped], "x", label=f"{part} skipped ({skipped.sum()})", **mark)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("step")
        axes.set_ylabel("loss scale")
        legend(axes)
        return figure
