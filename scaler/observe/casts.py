"""What a cast would do to values of which only their counts by exponent are known: pure, on the host.

A count says in which octave a value lies and not where in it. Where an octave lies across a limit of the format the
answer is an interval, and what a censored source hid is counted as unknown.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

from scaler.backend.formats import FloatFormat
from scaler.observe.bins import INFINITY, NAN, ZERO
from scaler.observe.classes import Classes, checked, classes_of, only, present_bins, scaled
from scaler.observe.rounding_error import Interval, signal_to_noise
from scaler.observe.source import Magnitudes, Source, check_power_of_two, magnitudes

_EXACT = Source()


@dataclasses.dataclass(frozen=True)
class Cast:
    """What a format would make of the counted values at a scale. Shares are of all values, zeros and NaN included.

    Attributes:
        values: How many values there are.
        zero: The share that is zero afterwards.
        underflow: The share that was not zero and is zero afterwards.
        subnormal: The share that is subnormal afterwards, and not zero.
        overflow: The share that is infinite afterwards; NaN in a format without infinities. What was infinite before is
            among them, what was NaN is not.
        unknown: The share of zeros, infinities and NaN in censored counts of which it is not known whether they are
            zero, subnormal, normal or infinite afterwards. It is contained in the widths of the intervals.
        headroom: log2 of the format's largest value over the largest magnitude: by how many octaves the scale could
            rise. Below 0 something may overflow; infinite where everything is zero. What was NaN does not count,
            unless it is censored.
        sqnr: Signal to quantization noise in dB, by the model in `scaler.observe.rounding_error`.
    """

    values: int
    zero: Interval
    underflow: Interval
    subnormal: Interval
    overflow: Interval
    unknown: float
    headroom: Interval
    sqnr: Interval


def cast(counts: ArrayLike, to: FloatFormat, scale: float = 1.0, source: Source = _EXACT) -> Cast:
    """What `to` would make of the counted values multiplied by `scale`.

    Args:
        counts: Int64 [280], as `exponents` returns them, or a sum of such.
        to: The format to cast to, rounding to nearest with ties to even.
        scale: A power of two. The values are those before the source's scale: for what a scaler at the scale S sees of
            float16 gradients, give `Source(float16, S, censored=True)` and S here.
        source: What was counted. Without it the values themselves, which may be of any format up to float32.

    Raises:
        InvalidArgument: For counts, a scale or a format that are none.
    """
    counts = checked(counts, to, source)
    check_power_of_two("scale", scale)
    total = int(counts.sum())
    limits = scaled(magnitudes(source), scale)
    classes = classes_of(limits, to)
    if not source.censored:
        # What was NaN is NaN afterwards, and none of these.
        classes = classes._replace(
            **{name: np.where(_ARE_NAN, False, kind) for name, kind in classes._asdict().items()}
        )
    zero, subnormal, overflow = (
        _share(counts, getattr(classes, name), only(classes, name)) for name in ("zero", "subnormal", "overflow")
    )
    return Cast(
        values=total,
        zero=zero,
        underflow=_underflow(counts, classes, source),
        subnormal=subnormal,
        overflow=overflow,
        unknown=_part(counts, _CENSORED & (np.sum(classes, axis=0) > 1)) if source.censored else 0.0,
        headroom=_headroom(counts, limits, to, source.censored),
        sqnr=signal_to_noise(counts, limits, to, source.censored, overflow),
    )


_ARE_NAN = np.arange(NAN + 1) == NAN
_CENSORED = np.isin(np.arange(NAN + 1), (ZERO, INFINITY, NAN))


def _part(counts: np.ndarray, bins: np.ndarray) -> float:
    return float(counts[bins].sum() / max(int(counts.sum()), 1))


def _share(counts: np.ndarray, possible: np.ndarray, certain: np.ndarray) -> Interval:
    return Interval(_part(counts, certain), _part(counts, possible))


def _underflow(counts: np.ndarray, classes: Classes, source: Source) -> Interval:
    were_zero = np.arange(NAN + 1) == ZERO
    certain, possible = only(classes, "zero") & ~were_zero, classes.zero
    return _share(counts, possible if source.censored else possible & ~were_zero, certain)


def _headroom(counts: np.ndarray, limits: Magnitudes, to: FloatFormat, censored: bool) -> Interval:
    present = present_bins(counts, censored)
    least, largest = (float(np.max(ends[present], initial=0.0)) for ends in (limits.least, limits.largest))
    return Interval(_octaves(to.max, largest), _octaves(to.max, least))


def _octaves(over: float, amax: float) -> float:
    if amax == 0.0:
        return math.inf
    return -math.inf if math.isinf(amax) else math.log2(over) - math.log2(amax)
