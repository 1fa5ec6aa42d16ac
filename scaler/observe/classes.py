"""What the values of each bin become in a cast: zero, subnormal, normal, or too large."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from scaler.backend.formats import FloatFormat
from scaler.errors import InvalidArgument
from scaler.observe.bins import NAN
from scaler.observe.source import Magnitudes, Source, check_counts, check_format


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
    """The counts as int64 [280], once all three are seen to be what they should be."""
    check_format("to", to)
    if not isinstance(source, Source):
        raise InvalidArgument(f"source={source!r}: expected an observe.Source.")
    return check_counts(counts, source)
