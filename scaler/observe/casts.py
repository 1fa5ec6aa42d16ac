"""What a cast would do to values of which only their counts by exponent are known: pure, on the host.

A count says in which octave a value lies and not where in it. Where an octave lies across a limit of the format the
answer is an interval, and what a censored source hid is counted as unknown.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE
from scaler.errors import InvalidArgument
from scaler.formats import FloatFormat
from scaler.observe.bins import INFINITY, NAN, ZERO
from scaler.observe.rounding_error import Interval, signal_to_noise
from scaler.observe.source import Magnitudes, Source, check_counts, check_format, check_power_of_two, magnitudes

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
            rise. Negative where something overflows, infinite where everything is zero. What was NaN does not count,
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
    counts = _checked(counts, to, source)
    check_power_of_two("scale", scale)
    total = int(counts.sum())
    limits = _scaled(magnitudes(source), scale)
    classes = _classes(limits, to)
    if not source.censored:
        # What was NaN is NaN afterwards, and none of these.
        classes = classes._replace(
            **{name: np.where(_ARE_NAN, False, kind) for name, kind in classes._asdict().items()}
        )
    zero, subnormal, overflow = (
        _share(counts, getattr(classes, name), _only(classes, name)) for name in ("zero", "subnormal", "overflow")
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


def best_scale(counts: ArrayLike, to: FloatFormat, source: Source = _EXACT) -> Interval:
    """The power of two that loses least in a cast to `to`: the largest at which nothing overflows.

    A larger scale makes fewer values zero and fewer subnormal, so the best one lies just below the first overflow. It
    is the best for these values. The next step's are others, which is why a scaler stays an octave or more below.

    Args:
        counts: As for `cast`.
        to: As for `cast`.
        source: As for `cast`.

    Returns:
        Powers of two in [2^-126, 2^126]: at `low` certainly nothing overflows, above `high` something certainly does.
        Where the largest magnitude is censored `low` is 0. Both are 0 if no such scale fits, and 2^126 for zeros.

    Raises:
        InvalidArgument: For counts or a format that are none.
    """
    counts = _checked(counts, to, source)
    present, limits = _present(counts, source.censored), magnitudes(source)
    fits = {True: 0.0, False: 0.0}
    for exponent in range(round(math.log2(SMALLEST_SCALE)), round(math.log2(LARGEST_SCALE)) + 1):
        classes = _classes(_scaled(limits, 2.0**exponent), to)
        if not classes.overflow[present].any():
            fits[True] = 2.0**exponent
        if not _only(classes, "overflow")[present].any():
            fits[False] = 2.0**exponent
    return Interval(fits[True], fits[False])


class _Classes(NamedTuple):
    """What values of each bin may become, bool [280] each. A bin may be in several."""

    zero: np.ndarray
    subnormal: np.ndarray
    normal: np.ndarray
    overflow: np.ndarray


_ARE_NAN = np.arange(NAN + 1) == NAN
_CENSORED = np.isin(np.arange(NAN + 1), (ZERO, INFINITY, NAN))


def _checked(counts: ArrayLike, to: FloatFormat, source: Source) -> np.ndarray:
    check_format("to", to)
    if not isinstance(source, Source):
        raise InvalidArgument(f"source={source!r}: expected an observe.Source.")
    return check_counts(counts, source)


def _scaled(limits: Magnitudes, scale: float) -> Magnitudes:
    return limits._replace(least=limits.least * scale, largest=limits.largest * scale, step=limits.step * scale)


def _classes(limits: Magnitudes, to: FloatFormat) -> _Classes:
    """By the ends of each bin: what the first and the last magnitude of it become, and all between them."""
    normal = to.smallest_normal - to.smallest_subnormal / 2
    # Each threshold belongs to the class below it or to the one above: a tie goes to the even neighbour.
    reaches_zero = limits.least <= to.zero_threshold
    leaves_zero = limits.largest > to.zero_threshold
    below_normal = limits.least < normal
    reaches_normal = (limits.largest > normal) | ((limits.largest == normal) & ~limits.open_above)
    if to.has_infinity:
        below_overflow = limits.least < to.overflow_threshold
        overflows = (limits.largest > to.overflow_threshold) | (
            (limits.largest == to.overflow_threshold) & ~limits.open_above
        )
    else:
        below_overflow = limits.least <= to.overflow_threshold
        overflows = limits.largest > to.overflow_threshold
    reaches_zero &= ~((limits.least == to.zero_threshold) & limits.open_below)
    below_overflow &= ~((limits.least == to.overflow_threshold) & limits.open_below)
    return _Classes(reaches_zero, leaves_zero & below_normal, reaches_normal & below_overflow, overflows)


def _only(classes: _Classes, name: str) -> np.ndarray:
    return getattr(classes, name) & (np.sum(classes, axis=0) == 1)


def _part(counts: np.ndarray, bins: np.ndarray) -> float:
    return float(counts[bins].sum() / max(int(counts.sum()), 1))


def _share(counts: np.ndarray, possible: np.ndarray, certain: np.ndarray) -> Interval:
    return Interval(_part(counts, certain), _part(counts, possible))


def _underflow(counts: np.ndarray, classes: _Classes, source: Source) -> Interval:
    were_zero = np.arange(NAN + 1) == ZERO
    certain, possible = _only(classes, "zero") & ~were_zero, classes.zero
    return _share(counts, possible if source.censored else possible & ~were_zero, certain)


def _present(counts: np.ndarray, censored: bool) -> np.ndarray:
    """The bins that hold something. What was NaN for sure has no magnitude."""
    present = np.flatnonzero(counts)
    return present if censored else present[present != NAN]


def _headroom(counts: np.ndarray, limits: Magnitudes, to: FloatFormat, censored: bool) -> Interval:
    present = _present(counts, censored)
    least, largest = (float(np.max(ends[present], initial=0.0)) for ends in (limits.least, limits.largest))
    return Interval(_octaves(to.max, largest), _octaves(to.max, least))


def _octaves(over: float, amax: float) -> float:
    if amax == 0.0:
        return math.inf
    return -math.inf if math.isinf(amax) else math.log2(over) - math.log2(amax)
