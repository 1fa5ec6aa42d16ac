"""Tables of a report: the values of each figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from loops.record.steps import Recorded
from loops.record.summary import number
from loops.support.pages import Table
from loops.views.charts.chart import sampled

_ROWS = 24
"""The most rows of a table of steps."""
_SKIPS = 60
"""The most rows of a table of skips."""
NONE = "\u2013"
_INFINITY = "\u221e"


def cell(value: float | int | str | None, form: str = ".4g") -> str:
    """A value as the text of a cell."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NONE
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return _INFINITY if value > 0 else f"\u2212{_INFINITY}"
    return (f"{value:,}" if isinstance(value, int) else f"{value:{form}}").replace("-", "\u2212")


def scale_cell(value: float) -> str:
    """A loss scale as the text of a cell."""
    return number(value) if math.isfinite(value) else cell(value)


def of_steps(run: Recorded, columns: Sequence[tuple[str, np.ndarray]], show: Callable[[float], str] = cell) -> Table:
    """Some columns at evenly spaced steps."""
    places = sampled(len(run), _ROWS).tolist()
    rows = [[cell(int(run.step[at])), *(show(float(values[at])) for _, values in columns)] for at in places]
    said = "" if len(places) == len(run) else f"{len(places)} of {len(run):,} steps"
    return Table(["step", *(name for name, _ in columns)], rows, said)


def of_skips(run: Recorded) -> list[Table]:
    """A table of the skipped steps, only the first and the last if there are many; none if no step was skipped."""
    places = np.flatnonzero(run.skipped).tolist()
    if not places:
        return []
    shown = places if len(places) <= _SKIPS else [*places[: _SKIPS // 2], *places[-_SKIPS // 2 :]]
    scale = run.column("loss_scale")
    rows = [
        [cell(int(run.step[at])), cell(str(run.cause[at]) or "unknown"), scale_cell(float(scale[at]))] for at in shown
    ]
    said = "Skipped steps"
    if len(shown) < len(places):
        said = f"Skipped steps: the first {_SKIPS // 2} and the last {_SKIPS // 2} of {len(places):,}"
    return [Table(["step", "cause", "loss scale"], rows, said)]
