"""What counts were taken of, and so which magnitudes a bin may stand for."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from scaler.backend.formats import FloatFormat, float_format
from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, check_constant, check_flag
from scaler.errors import InvalidArgument
from scaler.observe.bins import BINS, HIGHEST, INFINITY, LOWEST, NAN, ZERO, bin_of

_COUNTED = ("float16", "bfloat16", "float32")
_FLOAT32 = float_format("float32")


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
        check_format("format", self.format)
        if self.format.name not in _COUNTED:
            raise InvalidArgument(f"format={self.format.name}: expected one of {', '.join(_COUNTED)}.")
        check_power_of_two("scale", self.scale)
        check_flag("censored", self.censored)


def check_format(name: str, value: object) -> None:
    """Refuses anything but a `FloatFormat`."""
    if not isinstance(value, FloatFormat):
        raise InvalidArgument(f"{name}={value!r}: expected a FloatFormat, such as hs.float_format('float16').")


def check_power_of_two(name: str, value: object) -> None:
    """Refuses a scale that is not a power of two in [2^-126, 2^126]."""
    allowed = "a power of two in [2^-126, 2^126]"
    check_constant(
        name, value, allowed, lambda v: v == value and SMALLEST_SCALE <= v <= LARGEST_SCALE and math.frexp(v)[0] == 0.5
    )


def check_counts(counts: ArrayLike, source: Source) -> np.ndarray:
    """The counts as int64 [280].

    Raises:
        InvalidArgument: For another shape, for what are no counts, and for counts that the source's format cannot have.
    """
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
