"""The bins of `exponents`: one for each exponent of float32, and zero, infinity and NaN apart.

    index   0        1 ... 277           278        279
    holds   zero     2^-149 ... 2^127    infinity   NaN

The bin of the exponent e holds the magnitudes in [2^e, 2^(e+1)). The subnormals of float32 and bfloat16 lie in the
bins up to -127, those of float16 in the bins -24 to -15: each in bins of their own.
"""

from __future__ import annotations

LOWEST = -149
"""The exponent of float32's smallest subnormal number."""
HIGHEST = 127
"""The exponent of float32's largest number."""
ZERO = 0
"""The index of zeros of either sign."""
INFINITY = HIGHEST - LOWEST + 2
"""The index of infinities of either sign."""
NAN = INFINITY + 1
"""The index of NaN."""
BINS = NAN + 1
"""How many bins there are."""


def bin_of(exponent: int) -> int:
    """The index of the bin that holds [2^exponent, 2^(exponent + 1)), for an exponent from LOWEST to HIGHEST."""
    return exponent - LOWEST + 1
