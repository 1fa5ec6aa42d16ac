"""A chart as paths of an SVG that stretches to any width, with labels outside it that keep their size."""

from __future__ import annotations

import dataclasses

import numpy as np

from loops.record.thin import Envelope, envelope
from loops.views.charts.axis import Axis, steps_axis
from loops.views.charts.chart import Chart, Curve, Lane

_SIZE = 1000
"""Units of an SVG in each direction. The SVG is stretched; the width of its lines is not."""
_EXACT = 1500
"""The most changes of a staircase that is drawn exactly."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What `page.html` draws.

    Attributes:
        alt: What it shows, in words.
        x: The axis of the steps.
        y: The axis of the values.
        grid: The SVG path of the grid lines.
        level: The SVG path of a horizontal line; "" for none.
        lines: The look, label and SVG path of each curve, drawn in this order.
        lanes: The look, label and SVG path of each strip below.
    """

    alt: str
    x: Axis
    y: Axis
    grid: str
    level: str
    lines: tuple[tuple[str, str, str], ...]
    lanes: tuple[tuple[str, str, str], ...]

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """The lines to name: none if there is only one."""
        named = [line for line in self.lines if line[1]]
        return named if len(named) > 1 else []


def drawn(chart: Chart, columns: int) -> Drawn:
    """The paths of a chart.

    Args:
        chart: The chart.
        columns: The most points of a curve; a longer one keeps the extremes of each column. Marks of steps in the same
            column are one.
    """
    x, y = steps_axis(chart.first, chart.last), chart.y
    level = "" if chart.level is None else f"M0 {_across(float(y.of(np.array(chart.level))))}H{_SIZE}"
    return Drawn(
        chart.alt,
        x,
        y,
        "".join(f"M0 {_across(place)}H{_SIZE}" for place, _ in y.ticks),
        level,
        tuple((curve.look, curve.label, _path(curve, x, y, columns)) for curve in chart.curves),
        tuple((lane.look, lane.label, _marks(lane, x, columns)) for lane in chart.lanes),
    )


def _marks(lane: Lane, axis: Axis, columns: int) -> str:
    # Each mark is at least as wide as a column, so none is lost between them.
    places = np.unique((axis.of(lane.step) * columns).astype(np.int64))
    return "".join(f"M{round(_SIZE * place / columns, 1):g} 0V10" for place in places.tolist())


def _path(curve: Curve, along: Axis, across: Axis, columns: int) -> str:
    x, y = along.of(curve.step), across.of(curve.values)
    if curve.stairs:
        changes = np.flatnonzero(np.diff(np.nan_to_num(y, nan=-1.0), prepend=np.nan))
        if len(changes) <= max(_EXACT * columns // 600, 2):
            return _staircase(x, y, changes)
    found = envelope(x, y, columns)
    return _zigzag(found) if len(found.x) else ""


def _staircase(x: np.ndarray, y: np.ndarray, changes: np.ndarray) -> str:
    parts, down = [], True
    for place in changes.tolist():
        at, value = _along(x[place]), y[place]
        if np.isnan(value):
            parts.append("" if down else f"H{at}")
            down = True
        else:
            parts.append(f"M{at} {_across(value)}" if down else f"H{at}V{_across(value)}")
            down = False
    return "".join(parts) + ("" if down or not parts else f"H{_along(x[-1])}")


def _zigzag(found: Envelope) -> str:
    parts = []
    ends = [*found.broken[1:].tolist(), True]
    columns = zip(*(column.tolist() for column in found), ends, strict=True)
    for place, (at, low, high, broken, last) in enumerate(columns):
        begins = broken or not place
        first, second = (low, high) if place % 2 else (high, low)
        parts.append(f"{'M' if begins else 'L'}{_along(at)} {_across(first)}")
        if high > low:
            parts.append(f"V{_across(second)}")
        elif begins and last:  # A single point would be invisible.
            parts.append(f"h{_SIZE / 100 if len(ends) == 1 else _SIZE / 500:g}")
    return "".join(parts)


def _along(place: float) -> str:
    return f"{_SIZE * place:.1f}".removesuffix(".0")


def _across(place: float) -> str:
    return f"{_SIZE * (1 - place):.0f}"
