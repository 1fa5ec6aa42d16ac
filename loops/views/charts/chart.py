"""A chart of values over steps, as values: what draws it decides how it looks.

Reduces long curves to a few points without losing extremes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loops.views.charts.axis import Axis

RUNS = 6
"""The most curves of one kind: no more colours are distinct."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        label: For the legend; "" for none.
        step: Int64 [points], in order.
        values: Float64 [points]; NaN leaves a gap.
        look: The names of its colour and dashes: "blue", "faint", "orange dashed", or "run0" to "run5".
        stairs: Whether each value holds until the next one.
    """

    label: str
    step: np.ndarray
    values: np.ndarray
    look: str
    stairs: bool = False


@dataclasses.dataclass(frozen=True)
class Lane:
    """A strip below a chart with a mark for each of some steps.

    Attributes:
        label: What the marks stand for.
        step: Int64 [marks].
        look: The name of its colour, as of a `Curve`.
    """

    label: str
    step: np.ndarray
    look: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Attributes:
        alt: The same in words, for those who do not see it.
        quantity: What the values are, with their unit: "loss".
        first: The first step of the axis.
        last: The last one.
        y: The axis of the values.
        curves: Drawn in this order.
        lanes: Below the curves, from the top.
        level: The value of a horizontal line, or None.
    """

    alt: str
    quantity: str
    first: int
    last: int
    y: Axis
    curves: Sequence[Curve]
    lanes: Sequence[Lane] = ()
    level: float | None = None


class Envelope(NamedTuple):
    """The range of a curve in each column of pixels that has a value.

    Attributes:
        x: Float [columns], the middle of the column, from 0 to 1.
        low: Float [columns], the smallest value in it.
        high: Float [columns], the largest value in it.
        broken: Bool [columns], whether there is a gap before it.
    """

    x: np.ndarray
    low: np.ndarray
    high: np.ndarray
    broken: np.ndarray


def envelope(x: np.ndarray, values: np.ndarray, columns: int) -> Envelope:
    """The smallest and the largest value in each column.

    Args:
        x: Float [points], from 0 to 1, in order.
        values: Float [points]; NaN leaves a gap.
        columns: The number of columns. A curve with fewer points keeps all of them.
    """
    known = ~np.isnan(values)
    if len(x) <= columns:
        gap = np.concatenate([[False], ~known[:-1]])[known] if len(x) else np.zeros(0, bool)
        return Envelope(x[known], values[known], values[known], gap)
    place = np.minimum((x * columns).astype(np.int64), columns - 1)
    first = np.flatnonzero(np.diff(place, prepend=-1))
    low = np.fmin.reduceat(values, first)
    high = np.fmax.reduceat(values, first)
    there = ~np.isnan(low)
    gap = np.concatenate([[False], ~there[:-1]])[there]
    return Envelope((place[first][there] + 0.5) / columns, low[there], high[there], gap)


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """A centred mean of the finite values among `width` points, or one more if that is even; NaN if there are none."""
    half = width // 2
    finite = np.pad(np.isfinite(values), half)
    many = _moving_sum(finite.astype(np.float64), 2 * half + 1)
    # A power of two takes no digits away, and keeps the sum of the largest numbers finite.
    small = 0.5 ** int(2 * half + 1).bit_length()
    sums = _moving_sum(np.where(finite, np.pad(values, half), 0.0) * small, 2 * half + 1)
    return np.where(many > 0, sums / np.maximum(many, 1) / small, np.nan)


def _moving_sum(values: np.ndarray, width: int) -> np.ndarray:
    """The sum of each `width` neighbours, without a difference of sums, in which one huge value would hide the others.

    A window is the end of one block of `width` values and the beginning of the next, by van Herk (1992).
    """
    count = len(values) - width + 1
    blocks = np.pad(values, (0, -len(values) % width)).reshape(-1, width)
    ends = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].reshape(-1)
    begins = np.cumsum(blocks, axis=1).reshape(-1)
    first = np.arange(count)
    return ends[:count] + np.where(first % width, begins[first + width - 1], 0.0)


def sampled(length: int, most: int) -> np.ndarray:
    """Int64: up to `most` evenly spaced indices into `length` points, including the first and the last."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(np.int64))
