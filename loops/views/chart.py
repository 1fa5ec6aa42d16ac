"""A chart of values over steps, as values: what draws it decides how it looks.

Its axes map values to [0, 1], and place ticks with labels. Long curves are reduced to a few points without losing
extremes, and tensors over many steps to the cells of a heat map.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from loops.record.steps import Measured

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
    low = high = values
    if len(x) > columns:
        place = np.minimum((x * columns).astype(np.int64), columns - 1)
        first = np.flatnonzero(np.diff(place, prepend=-1))
        x, low, high = (place[first] + 0.5) / columns, np.fmin.reduceat(values, first), np.fmax.reduceat(values, first)
    there = ~np.isnan(low)
    return Envelope(x[there], low[there], high[there], np.append(False, ~there)[:-1][there])


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


_MINUS = "\u2212"
_LARGEST = math.log(1.7e308)
"""The natural logarithm of an end of an axis, which must be a number."""
_MOST = 8e307
"""The end of an axis of values whose distance, or whose margin, is beyond float64."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        low: The value at 0; its logarithm on a logarithmic axis.
        high: The value at 1, likewise.
        ticks: The position of each tick, in [0, 1], with its label.
        log: The base of a logarithmic axis; 0 for a linear one.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: int = 0

    def of(self, values: np.ndarray) -> np.ndarray:
        """Positions of values, clipped to [0, 1]; NaN for NaN, and on a logarithmic axis for values up to 0."""
        values = np.asarray(values, np.float64)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log(np.where(values > 0, values, np.nan)) / math.log(self.log)
        return (np.clip(values, self.low, self.high) - self.low) / (self.high - self.low)

    @property
    def limits(self) -> tuple[float, float]:
        """The values at both ends."""
        if not self.log:
            return self.low, self.high
        low, high = (math.exp(min(end * math.log(self.log), _LARGEST)) for end in (self.low, self.high))
        return low, high


def steps_axis(first: int, last: int) -> Axis:
    """The axis of steps, with few ticks: it must fit a phone."""
    low, high = float(first), float(max(last, first + 1))
    high = max(high, math.nextafter(low, math.inf))  # Beyond 2^53 a float does not know the next step.
    ticks = [value for value in _round_values(low, high, 5) if value.is_integer()]
    return _placed(low, high, [(value, _count(value)) for value in ticks])


def linear_axis(values: np.ndarray, floor: float | None = None) -> Axis:
    """An axis around all finite values, reaching down to `floor` if given."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    low = low if floor is None else min(low, floor)
    if not math.isfinite(max(abs(low), abs(high), high - low) * 1.1):
        # Values beyond lie on the edge: the length of the axis must be a number.
        low, high = max(low, -_MOST), min(high, _MOST)
        low = min(low, high)
    spread = (high - low) or abs(high) or 1.0
    low, high = low - 0.04 * spread, high + 0.04 * spread
    return _placed(low, high, [(value, _plain(value)) for value in _round_values(low, high, 5)])


def loss_axis(values: np.ndarray) -> Axis:
    """An axis for losses: logarithmic where they are positive and span more than a factor of 30."""
    finite = values[np.isfinite(values)]
    if not len(finite) or finite.min() <= 0 or finite.max() / 30 < finite.min():
        return linear_axis(values)
    return _log_axis(math.log10(finite.min()) - 0.08, math.log10(finite.max()) + 0.08, 10)


def octave_axis(values: np.ndarray) -> Axis:
    """An axis of powers of two around all positive values."""
    usable = values[np.isfinite(values) & (values > 0)]
    low = math.floor(math.log2(usable.min())) - 1 if len(usable) else -1
    high = math.ceil(math.log2(usable.max())) + 1 if len(usable) else 1
    return _log_axis(low, high, 2)


def _log_axis(low: float, high: float, base: int) -> Axis:
    every = max(1, math.ceil((high - low) / 6))
    powers = [power for power in range(math.ceil(low), math.floor(high) + 1) if power % every == 0]
    return _placed(
        low, high, [(power, Markup("{}<sup>{}</sup>").format(base, _plain(power))) for power in powers], base
    )


def _placed(low: float, high: float, ticks: list[tuple[float, str]], log: int = 0) -> Axis:
    return Axis(low, high, tuple(((value - low) / (high - low), label) for value, label in ticks), log)


def _round_values(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two numbers, at most about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)
    return [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _plain(value: float) -> str:
    return f"{value:.6g}".replace("-", _MINUS)


def _count(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


NOT_MEASURED, ALL_ZERO, NOT_A_NUMBER, INFINITE = 0, 1, 2, 3
FIRST = 4
"""The byte of the lowest exponent of a cell."""
LOWEST, HIGHEST = -123, 128
"""The range of exponents in a cell; others are clipped to it."""


def heat_cells(measured: Measured, kept: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The cells of some tensors.

    Args:
        measured: The measured tensors of a run.
        kept: Indices of the tensors, int64 [tensors].
        columns: The most columns; each stands for as many steps.

    Returns:
        Int64 [columns], the first step of each, and uint8 [tensors, columns] as of `cells_of`, or `NOT_MEASURED`.
    """
    count = len(measured.step)
    edges = np.unique(np.linspace(0, count, min(columns, count) + 1).astype(np.int64))
    cells = [
        np.where(
            measured.missing[start:end, kept].all(axis=0), NOT_MEASURED, cells_of(measured.amax[start:end, kept])
        ).astype(np.uint8)
        for start, end in itertools.pairwise(edges)
    ]
    return measured.step[edges[:-1]], np.stack(cells, 1)


def cells_of(amax: np.ndarray) -> np.ndarray:
    """A byte for each tensor: its largest magnitude over some steps.

    Args:
        amax: Float32 [steps, tensors].

    Returns:
        Uint8 [tensors]: the exponent, offset by `FIRST`; or `ALL_ZERO`, `NOT_A_NUMBER` or `INFINITE`.
    """
    broken, infinite = np.isnan(amax).any(axis=0), np.isinf(amax).any(axis=0)
    largest = np.where(np.isfinite(amax), amax, 0.0).max(axis=0)
    _, exponent = np.frexp(largest)
    found = np.clip(exponent - 1, LOWEST, HIGHEST) - LOWEST + FIRST
    found = np.where(largest == 0, ALL_ZERO, found)
    found = np.where(infinite, INFINITE, found)
    return np.where(broken, NOT_A_NUMBER, found).astype(np.uint8)
