"""The rounding error of a cast, from counts by exponent: signal to quantization noise.

    SQNR = 10 log10(sum x^2 / sum (cast(x) - x)^2)

Counts do not hold the values, so this is a model, whose assumption is that within a bin all magnitudes that its format
can hold are equally frequent. For the bin [p, 2p), with neighbours s apart in the source's format and u in the other:

    n = p / s values, the mean of x^2 = p^2 (1 + (n - 1) / n + (n - 1) (2n - 1) / (6 n^2)), or 7/3 p^2 for many
    noise: 0 where u <= s, else (u^2 + 2 s^2) / 12
           where p = u / 2, and all is rounded up to u: (u^2 + 3 u s + 2 s^2) / 12; below it x becomes zero: x^2

Where s is 0, any real number is possible. For 4,000 normal, log-normal (sigma 1) or uniform values the model was within
1.5 dB of real casts to float16, bfloat16 and float8. Where a few values make up the sums it is further off: what the
bins allow reaches from 8.5 dB below the model to no error at all. A value that overflows has an infinite error.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from scaler.backend.formats import FloatFormat
from scaler.observe.bins import INFINITY, NAN, ZERO
from scaler.observe.source import Magnitudes


class Interval(NamedTuple):
    """What a number is at least and at most. Both are equal where it is known.

    Attributes:
        low: The least.
        high: The largest.
    """

    low: float
    high: float


def signal_to_noise(
    counts: np.ndarray, limits: Magnitudes, to: FloatFormat, censored: bool, overflow: Interval
) -> Interval:
    """The SQNR in dB: infinity without an error, minus infinity with an overflow.

    Args:
        counts: Int64 [280].
        limits: What the bins stand for at the scale of the cast.
        to: The format.
        censored: Whether zeros, infinities and NaN hide other values.
        overflow: The share that overflows.
    """
    if overflow.low > 0:
        return Interval(-math.inf, -math.inf)
    finite = slice(ZERO + 1, INFINITY)
    signal = float(counts[finite] @ _mean_square(limits)[finite])
    noise = float(counts[finite] @ _noise(limits, to)[finite])
    high = _decibels(signal, noise)
    if censored and counts[INFINITY] + counts[NAN]:
        return Interval(-math.inf, math.inf)
    if overflow.high > 0:
        return Interval(-math.inf, high)
    if not censored or not counts[ZERO]:
        return Interval(high, high)
    # No rounding to nearest errs by more than the value or by more than half a step.
    hidden = float(limits.largest[ZERO])
    worst = min(hidden, _steps(np.array([hidden]), to)[0] / 2)
    low = _decibels(signal, noise + float(counts[ZERO]) * worst**2)
    # At best what is hidden is signal, all of it, with no error.
    return Interval(low, _decibels(signal + float(counts[ZERO]) * hidden**2, noise))


def _powers(limits: Magnitudes) -> np.ndarray:
    """The power of two at which each bin begins; in censored counts `least` is up to a quarter below it."""
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(np.where(np.isfinite(limits.largest), limits.largest, 0.0))
    return np.ldexp(0.5, exponent) * (mantissa > 0)


def _steps(magnitude: np.ndarray, to: FloatFormat) -> np.ndarray:
    """The distance between neighbours in the format."""
    _, exponent = np.frexp(magnitude)
    return np.maximum(np.ldexp(to.epsilon, exponent - 1), to.smallest_subnormal)


def _mean_square(limits: Magnitudes) -> np.ndarray:
    power = _powers(limits)
    # The part of the bin that one value stands for: 1 / n.
    part = np.divide(limits.step, power, out=np.zeros_like(power), where=power > 0)
    part = np.minimum(part, 1.0)
    return power**2 * (1 + (1 - part) + (1 - part) * (2 - part) / 6)


def _noise(limits: Magnitudes, to: FloatFormat) -> np.ndarray:
    power = _powers(limits)
    step = _steps(power, to)
    rounded = np.where(step <= limits.step, 0.0, (step**2 + 2 * limits.step**2) / 12)
    rounded += np.where(power == to.zero_threshold, step * limits.step / 4, 0.0)
    return np.where(2 * power <= to.zero_threshold, _mean_square(limits), rounded)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
