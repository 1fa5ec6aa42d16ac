"""The scale that loses least in a cast, from counts by exponent."""

from __future__ import annotations

import math

from numpy.typing import ArrayLike

from scaler.backend.formats import FloatFormat
from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE
from scaler.errors import InvalidArgument
from scaler.observe.classes import checked, classes_of, only, present_bins, scaled
from scaler.observe.rounding_error import Interval
from scaler.observe.source import Source, magnitudes

_EXACT = Source()


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
