"""The loss over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import scaler
from loops.record import as_recorded
from loops.support.part_names import columns_of, named
from loops.views.charts.chart import RUNS
from loops.views.charts.losses import loss_chart, losses_chart
from loops.views.plots.draw import draw, needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss(*runs: Any) -> Figure:
    """The loss of each step, its moving mean, and marks where it was not finite.

    Args:
        runs: One to six runs, in any form that `loops.views.plots` takes. For several, only moving means are drawn. Of
            a composed step each part has a loss: six losses of all runs together.

    Raises:
        scaler.InvalidArgument: For no run, more than six losses, or something that is not a run.
        LoopError: Without matplotlib, or if no loss is finite.
    """
    if not 0 < len(runs) <= RUNS:
        raise scaler.InvalidArgument(f"loss: {len(runs)} runs: expected 1 to {RUNS}, so that curves stay distinct.")
    found = [as_recorded(run) for run in runs]
    shown = [(run, part, name) for run in found for part, name in columns_of(run.columns, "loss").items()]
    needs("loss", *found)
    if len(shown) > RUNS:
        raise scaler.InvalidArgument(
            f"loss: {len(shown)} losses of {len(runs)} runs: expected 1 to {RUNS}, so that curves stay distinct."
        )
    if len(shown) == 1:
        return draw(loss_chart(*shown[0]))
    one = len(found) == 1
    return draw(losses_chart([(part if one else named(run.name, part), run, part, name) for run, part, name in shown]))
