"""What the plots share: curves of any length, and legends."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.record.run import Recorded
from loops.record.thin import envelope
from loops.support.errors import LoopError

_COLUMNS = 2000


def curve(axes: Any, run: Recorded, values: np.ndarray, **line: Any) -> None:
    """Draws a value over the steps; for a long run, the extremes in each of 2,000 columns."""
    if len(run) <= _COLUMNS:
        axes.plot(run.step, values, **line)
        return
    first, last = float(run.step[0]), float(run.step[-1])
    found = envelope((run.step - first) / (last - first), values, _COLUMNS)
    steps = np.repeat(first + found.x * (last - first), 2)
    axes.plot(steps, np.stack([found.low, found.high], axis=1).ravel(), **line)


def legend(axes: Any) -> None:
    """Puts a legend above the axes if several curves are named. Names are shown literally, not as math text."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        entries = axes.figure.legend(handles, labels, loc="outside upper left", ncols=3)
        for text in entries.get_texts():
            text.set_parse_math(False)


def needs(run: Recorded, *names: str) -> None:
    """Refuses a run without the columns that a plot shows.

    Raises:
        LoopError: If all of these columns are missing or not finite.
    """
    if not any(np.isfinite(run.column(name)).any() for name in names):
        notes = " ".join(run.notes)
        raise LoopError(
            f"{run.name}: nothing to draw: it has no {' and no '.join(names)} that is finite. {notes}".rstrip()
        )
