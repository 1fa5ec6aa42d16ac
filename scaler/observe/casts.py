"""What a cast would do to values of which only their counts by exponent are known: pure, on the host.

A count says in which octave a value lies and not where in it. Where an octave lies across a limit of the format the
answer is an interval, and what a censored source hid is counted as unknown.

The rounding error is a model, SQNR = 10 log10(sum x^2 / sum (cast(x) - x)^2), whose assumption is that within a bin all
magnitudes that its format can hold are equally frequent. For the bin [p, 2p), with neighbours s apart in the source's
format and u in the other:

    n = p / s values, the mean of x^2 = p^2 (1 + (n - 1) / n + (n - 1) (2n - 1) / (6 n^2)), or 7/3 p^2 for many
    noise: 0 where u <= s, else (u^2 + 2 s^2) / 12
           where p = u / 2, and all is rounded up to u: (u^2 + 3 u s + 2 s^2) / 12; below it x becomes zero: x^2

Where s is 0, any real number is possible. For 4,000 normal, log-normal (sigma 1) or uniform values the model was within
1.5 dB of real casts to float16, bfloat16 and float8. Where a few values make up the sums it is further off: what the
bins allow reaches from 8.5 dB below the model to no error at all. A value that overflows has an infinite error.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from scaler.backend.formats import FloatFormat, float_format
from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, check_constant, check_flag
from scaler.errors import InvalidArgument
from scaler.observe.exponents import BINS, DTYPES, HIGHEST, INFINITY, LOWEST, NAN, ZERO, bin_of

_COUNTED = [dtype.name for dtype in DTYPES]
_FLOAT32 = float_format("float32")
_ARE_NAN = np.arange(NAN + 1) == NAN
_CENSORED = np.isin(np.arange(NAN + 1), (ZERO, INFINITY, NAN))


class Interval(NamedTuple):
    """What a number is at least and at most. Both are equal where it is known.

    Attributes:
        low: The least.
        high: The largest.
    """

    low: float
    high: float


def _check_format(name: str, value: object) -> None:
    """Refuses anything but a `FloatFormat`."""
    if not isinstance(value, FloatFormat):
        raise InvalidArgument(f"{name}={value!r}: expected a FloatFormat, such as hs.float_format('float16').")


def _check_power_of_two(name: str, value: object) -> None:
    """Refuses a scale that is not a power of two in [2^-126, 2^126]."""
    allowed = "a power of two in [2^-126, 2^126]"
    check_constant(
        name, value, allowed, lambda v: v == value and SMALLEST_SCALE <= v <= LARGEST_SCALE and math.frexp(v)[0] == 0.5
    )


@dataclasses.dataclass(frozen=True)
class Source:
    """What counts were taken of: values in a format, multiplied by a loss scale before they were put into it.

    With `censored=False` the values that were counted are the values that are meant, such as weights, or gradients of a
    float32 model: a zero is a zero.

    With `censored=True` they are what the format left of others, such as the float16 gradients of a scaled loss. A
    counted zero may have been any magnitude up to half of the smallest subnormal, an infinity any from the overflow
    threshold on, a NaN anything; and a finite value was rounded. What is asked is then asked about the values before
    the cast, and the answers are intervals.

    Attributes:
        format: The format of the tensors that were counted: float16, bfloat16 or float32.
        scale: The power of two that the values were multiplied by, in [2^-126, 2^126].
        censored: Whether the values meant are those before the cast to `format`.

    Raises:
        InvalidArgument: For another format, or a scale that is not such a power of two.
    """

    format: FloatFormat = _FLOAT32
    scale: float = 1.0
    censored: bool = False

    def __post_init__(self) -> None:
        _check_format("format", self.format)
        if self.format.name not in _COUNTED:
            raise InvalidArgument(f"format={self.format.name}: expected one of {', '.join(_COUNTED)}.")
        _check_power_of_two("scale", self.scale)
        check_flag("censored", self.censored)


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
        sqnr: Signal to quantization noise in dB, by the model of `scaler.observe.casts`.
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
    _check_power_of_two("scale", scale)
    total = int(counts.sum())
    limits = scaled(magnitudes(source), scale)
    classes = classes_of(limits, to)
    if not source.censored:
        # What was NaN is NaN afterwards, and none of these.
        classes = Classes(*(kind & ~_ARE_NAN for kind in classes))
    were_zero = np.arange(NAN + 1) == ZERO
    vanish = classes.zero if source.censored else classes.zero & ~were_zero
    present = present_bins(counts, source.censored)
    least, largest = (float(np.max(ends[present], initial=0.0)) for ends in (limits.least, limits.largest))
    zero, subnormal, overflow = (
        _share(counts, getattr(classes, name), only(classes, name)) for name in ("zero", "subnormal", "overflow")
    )
    return Cast(
        values=total,
        zero=zero,
        underflow=_share(counts, vanish, only(classes, "zero") & ~were_zero),
        subnormal=subnormal,
        overflow=overflow,
        unknown=_part(counts, _CENSORED & (np.sum(classes, axis=0) > 1)) if source.censored else 0.0,
        headroom=Interval(_octaves(to.max, largest), _octaves(to.max, least)),
        sqnr=signal_to_noise(counts, limits, to, source.censored, overflow),
    )


def _part(counts: np.ndarray, bins: np.ndarray) -> float:
    return float(counts[bins].sum() / max(int(counts.sum()), 1))


def _share(counts: np.ndarray, possible: np.ndarray, certain: np.ndarray) -> Interval:
    return Interval(_part(counts, certain), _part(counts, possible))


def _octaves(over: float, amax: float) -> float:
    if amax == 0.0:
        return math.inf
    return -math.inf if math.isinf(amax) else math.log2(over) - math.log2(amax)


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
        InvalidArgument: For counts or a format that are none, and for counts of nothing.
    """
    counts = checked(counts, to, source)
    if not counts.any():
        raise InvalidArgument(
            "best_scale(counts): nothing was counted, all 280 are 0. With watch(every=...) so are the counts of the "
            "steps between."
        )
    present, limits = present_bins(counts, source.censored), magnitudes(source)
    fits = {True: 0.0, False: 0.0}
    for exponent in range(round(math.log2(SMALLEST_SCALE)), round(math.log2(LARGEST_SCALE)) + 1):
        classes = classes_of(scaled(limits, 2.0**exponent), to)
        if not classes.overflow[present].any():
            fits[True] = 2.0**exponent
        if not only(classes, "overflow")[present].any():
            fits[False] = 2.0**exponent
    return Interval(fits[True], fits[False])


class Magnitudes(NamedTuple):
    """The magnitudes that each bin may stand for, before the source's scale: float64 [280] each.

    All are sums of two powers of two between 2^-401 and 2^382, so float64 holds them exactly.

    Attributes:
        least: The smallest.
        open_below: Bool, whether `least` itself is not among them.
        largest: The largest.
        open_above: Bool, whether `largest` itself is not among them.
        step: The distance between neighbours, 0 where any real number is possible.
    """

    least: np.ndarray
    open_below: np.ndarray
    largest: np.ndarray
    open_above: np.ndarray
    step: np.ndarray


def magnitudes(source: Source) -> Magnitudes:
    """Which magnitudes each bin may stand for. NaN, and an infinity that is not censored, have infinity as both."""
    form = source.format
    powers = 2.0 ** np.arange(LOWEST, HIGHEST + 1)
    steps = np.maximum(powers * form.epsilon, form.smallest_subnormal)
    least, largest, step = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)
    open_below, open_above = np.zeros(BINS, bool), np.zeros(BINS, bool)
    finite = slice(ZERO + 1, INFINITY)
    least[[INFINITY, NAN]] = largest[[INFINITY, NAN]] = math.inf
    if not source.censored:
        least[finite], largest[finite], step[finite] = powers, np.maximum(2 * powers - steps, powers), steps
    else:
        below = np.maximum(powers / 2 * form.epsilon, form.smallest_subnormal)
        # Ties go to the powers of two, whose last bit is 0; of the smallest subnormal alone it is 1.
        least[finite], largest[finite] = powers - below / 2, 2 * powers - steps / 2
        open_below[finite], open_above[finite] = powers == form.smallest_subnormal, True
        largest[ZERO], least[INFINITY], least[NAN] = form.zero_threshold, form.overflow_threshold, 0.0
    return Magnitudes(least / source.scale, open_below, largest / source.scale, open_above, step / source.scale)


class Classes(NamedTuple):
    """What values of each bin may become, bool [280] each. A bin may be in several."""

    zero: np.ndarray
    subnormal: np.ndarray
    normal: np.ndarray
    overflow: np.ndarray


def classes_of(limits: Magnitudes, to: FloatFormat) -> Classes:
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
    return Classes(reaches_zero, leaves_zero & below_normal, reaches_normal & below_overflow, overflows)


def only(classes: Classes, name: str) -> np.ndarray:
    """The bins of which all values become this."""
    return getattr(classes, name) & (np.sum(classes, axis=0) == 1)


def scaled(limits: Magnitudes, scale: float) -> Magnitudes:
    """The magnitudes times a power of two."""
    return limits._replace(least=limits.least * scale, largest=limits.largest * scale, step=limits.step * scale)


def present_bins(counts: np.ndarray, censored: bool) -> np.ndarray:
    """The bins that hold something. What was NaN for sure has no magnitude."""
    present = np.flatnonzero(counts)
    return present if censored else present[present != NAN]


def checked(counts: ArrayLike, to: FloatFormat, source: Source) -> np.ndarray:
    """The counts as int64 [280].

    Raises:
        InvalidArgument: For what is no format and no source, for another shape, for what are no counts, and for counts
            that the source's format cannot have.
    """
    _check_format("to", to)
    if not isinstance(source, Source):
        raise InvalidArgument(f"source={source!r}: expected an observe.Source.")
    array = np.asarray(counts)
    if array.shape != (BINS,) or not np.issubdtype(array.dtype, np.integer) or (array < 0).any():
        raise InvalidArgument(
            f"counts of shape {array.shape} and dtype {array.dtype}: expected {BINS} integers from 0 on, as "
            "observe.exponents returns them."
        )
    smallest, largest = (math.floor(math.log2(end)) for end in (source.format.smallest_subnormal, source.format.max))
    if array[ZERO + 1 : bin_of(smallest)].any() or array[bin_of(largest) + 1 : INFINITY].any():
        raise InvalidArgument(
            f"counts of exponents outside {smallest} to {largest}, which {source.format.name} does not have. "
            "Name the format of the tensors that were counted."
        )
    return array.astype(np.int64)


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
