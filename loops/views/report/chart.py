"""A chart: an SVG that stretches to any width, with labels outside it that keep their size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from loops.record.thin import Envelope, envelope
from loops.views.report.axes import Axis

_SIZE = 1000
"""Units of an SVG in each direction. The SVG is stretched; the width of its lines is not."""
_EXACT = 1500
"""The most changes of a staircase that is drawn exactly."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve in a chart.

    Attributes:
        label: For the legend; "" for none.
        x: Float [points], from 0 to 1.
        y: Float [points], from 0 to 1; NaN leaves a gap.
        kind: The CSS class for its colour and dashes.
        stairs: Whether each value holds until the next one.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    kind: str
    stairs: bool = False


@dataclasses.dataclass(frozen=True)
class Lane:
    """A strip below a chart with a mark for each of some steps.

    Attributes:
        label: What the marks stand for.
        x: Float [marks], from 0 to 1.
        kind: The CSS class for its colour.
    """

    label: str
    x: np.ndarray
    kind: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """What `page.html` draws.

    Attributes:
        alt: What it shows, in words.
        x: The axis of the steps.
        y: The axis of the values.
        grid: The SVG path of the grid lines.
        level: The SVG path of a horizontal line; "" for none.
        lines: The kind, label and SVG path of each curve, drawn in this order.
        lanes: The kind, label and SVG path of each strip below.
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


def chart(
    alt: str,
    y: Axis,
    x: Axis,
    lines: Sequence[Curve],
    *,
    columns: int,
    lanes: Sequence[Lane] = (),
    level: float | None = None,
) -> Chart:
    """A chart with its paths.

    Args:
        alt: What it shows, in words.
        y: The axis of the values.
        x: The axis of the steps.
        lines: The curves, drawn in this order.
        columns: The most points of a curve; a longer one keeps the extremes of each column.
        lanes: The strips below; steps in the same column share a mark.
        level: The height of a horizontal line, from 0 to 1.
    """
    return Chart(
        alt,
        x,
        y,
        "".join(f"M0 {_across(place)}H{_SIZE}" for place, _ in y.ticks),
        "" if level is None else f"M0 {_across(level)}H{_SIZE}",
        tuple((line.kind, line.label, _path(line, columns)) for line in lines),
        tuple((lane.kind, lane.label, _marks(lane, columns)) for lane in lanes),
    )


def _marks(lane: Lane, columns: int) -> str:
    # Each mark is at least as wide as a column, so none is lost between them.
    places = np.unique((np.clip(lane.x, 0, 1) * columns).astype(np.int64))
    return "".join(f"M{round(_SIZE * place / columns, 1):g} 0V10" for place in places.tolist())


def _path(line: Curve, columns: int) -> str:
    if line.stairs:
        changes = np.flatnonzero(np.diff(np.nan_to_num(line.y, nan=-1.0), prepend=np.nan))
        if len(changes) <= max(_EXACT * columns // 600, 2):
            return _staircase(line, changes)
    found = envelope(line.x, line.y, columns)
    return _zigzag(found, line.x, columns) if len(found.x) else ""


def _staircase(line: Curve, changes: np.ndarray) -> str:
    parts, down = [], True
    for place in changes.tolist():
        x, y = _along(line.x[place]), line.y[place]
        if np.isnan(y):
            parts.append("" if down else f"H{x}")
            down = True
        else:
            parts.append(f"M{x} {_across(y)}" if down else f"H{x}V{_across(y)}")
            down = False
    return "".join(parts) + ("" if down or not parts else f"H{_along(line.x[-1])}")


def _zigzag(found: Envelope, x: np.ndarray, columns: int) -> str:
    parts = []
    for place, (at, low, high, broken) in enumerate(zip(*(column.tolist() for column in found), strict=True)):
        first, second = (low, high) if place % 2 else (high, low)
        parts.append(f"{'M' if broken or not place else 'L'}{_along(at)} {_across(first)}")
        if high > low:
            parts.append(f"V{_across(second)}")
    if len(found.x) == 1:  # A single point would be invisible.
        parts.append(f"h{_SIZE / 100:g}")
    return "".join(parts)


def _along(place: float) -> str:
    return f"{_SIZE * place:.1f}".removesuffix(".0")


def _across(place: float) -> str:
    return f"{_SIZE * (1 - place):.0f}"
