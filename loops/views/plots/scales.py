"""The loss scale over the steps, with each skip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loops.record import as_recorded
from loops.support.part_names import columns_of
from loops.views.charts.scales import scale_chart, scales_chart
from loops.views.plots.draw import draw, needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss_scale(run: Any) -> Figure:
    """The loss scale, the largest one that would have been finite, and below it each skip, by its cause.

    Of a composed step it draws the scale of each part, and below them the steps that each part skipped.

    Args:
        run: A run, in any form that `loops.views.plots` takes.

    Raises:
        scaler.InvalidArgument: If `run` is not a run.
        LoopError: Without matplotlib, or if the run has no loss scale.
    """
    found = as_recorded(run)
    needs("loss_scale", found)
    parts = columns_of(found.columns, "loss_scale")
    if parts and "" not in parts:
        return draw(scales_chart([(part, found, part, name) for part, name in parts.items()]))
    return draw(scale_chart(found))
