"""The headroom in octaves before something overflows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loops.record import as_recorded
from loops.support.errors import LoopError
from loops.views.charts.headroom import headroom_chart
from loops.views.plots.draw import draw

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
    chart = headroom_chart(found)
    if chart is None:
        raise LoopError(f"{found.name}: its headroom is not known. {' '.join(found.notes)}".rstrip())
    return draw(chart)
