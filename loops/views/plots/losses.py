"""The loss over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import scaler
from loops.record import as_recorded
from loops.record.thin import moving_mean
from loops.support.drawing import drawing
from loops.support.palette import BLACK, FAINT, SERIES
from loops.support.part_names import columns_of, named
from loops.views.plots.frame import curve, legend, needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DASHES: Any = ("-", "--", ":", "-.", (0, (4, 4)), (0, (9, 3)))
_LOOKS = tuple(zip((*SERIES[:5], BLACK), _DASHES, strict=True))
_SMOOTH = 50


def loss(*runs: Any) -> Figure:
    """The loss of each step, its moving mean, and marks where it was not finite.

    Args:
        runs: One to six runs, in any form that `loops.views.plots` takes. For several, only moving means are drawn. Of
            a composed step each part has a loss: six losses of all runs together.

    Raises:
        scaler.InvalidArgument: For no run, more than six losses, or something that is not a run.
        LoopError: Without matplotlib, or if no loss is finite.
    """
    if not 0 < len(runs) <= len(_LOOKS):
        raise scaler.InvalidArgument(
            f"loss: {len(runs)} runs: expected 1 to {len(_LOOKS)}, so that curves stay distinct."
        )
    found = [as_recorded(run) for run in runs]
    shown = [(run, part, name) for run in found for part, name in columns_of(run.columns, "loss").items()]
    for run in found:
        needs(run, *columns_of(run.columns, "loss").values() or ["loss"])
    if len(shown) > len(_LOOKS):
        raise scaler.InvalidArgument(
            f"loss: {len(shown)} losses of {len(runs)} runs: expected 1 to {len(_LOOKS)}, so that curves stay distinct."
        )
    with drawing() as figure:
        axes = figure.subplots()
        for (run, part, name), (colour, dashes) in zip(shown, _LOOKS, strict=False):
            values = run.column(name)
            if len(shown) == 1:
                curve(axes, run, np.where(np.isfinite(values), values, np.nan), color=FAINT, linewidth=0.8)
            mean = moving_mean(values, max(3, len(run) // _SMOOTH))
            label = part if len(found) == 1 and part else named(run.name, part)
            curve(axes, run, mean, color=colour, linestyle=dashes, linewidth=1.4, label=label)
            # Between its turns a part has no loss.
            turn = run.column(f"{part}/attempted") == 1 if part else True
            lost = run.step[~np.isfinite(values) & turn]
            if len(lost):
                where: Any = {"transform": axes.get_xaxis_transform(), "clip_on": False}
                label = f"not finite: {len(lost)} steps"
                axes.plot(lost, np.full(len(lost), 0.02), "|", color=colour, markersize=8, label=label, **where)
        every = np.concatenate([run.column(name) for run, _, name in shown])
        usable = every[np.isfinite(every)]
        if usable.min() > 0 and usable.max() > 30 * usable.min():
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        legend(axes)
        return figure
