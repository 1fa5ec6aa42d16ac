"""Counts by exponent in pure Python, one value after another, and values at the limits of formats."""

import math

import ml_dtypes
import numpy as np

FORMATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
PATTERNS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}
EDGES = (65504, 65519, 65520, 65536, 448, 464, 57344, 61440, 1.0, 1.5, 0.75, 2.0**-14, 2.0**-14 - 2.0**-25, 2.0**-14)
EDGES += tuple(
    factor * 2.0**power for power in (-6, -9, -14, -16, -24, -126, -133, -149) for factor in (0.5, 1, 1.5, 2)
)


def values_of(patterns, name):
    """The values that have these bits."""
    return np.array(patterns, PATTERNS[name]).view(FORMATS[name])


def reference(values):
    """What `observe.exponents` should return, from `math.frexp`."""
    counts = np.zeros(280, np.int64)
    # Python's float is a float64, which holds every value of the formats as a normal number.
    for value in map(float, np.ravel(values)):
        if value == 0:
            counts[0] += 1
        elif math.isinf(value):
            counts[278] += 1
        elif math.isnan(value):
            counts[279] += 1
        else:
            counts[math.frexp(value)[1] - 1 + 150] += 1
    return counts


def patterns_at(name, edge):
    """The bits of a number, or of the largest, and of its neighbours."""
    with np.errstate(over="ignore"):
        middle = int(np.array(edge, np.float64).astype(FORMATS[name]).view(PATTERNS[name]))
    return [max(middle + step, 0) for step in (-1, 0, 1)]
