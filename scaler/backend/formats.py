"""The limits of each floating-point format, and what a cast to it does to a tensor."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

from scaler.errors import InvalidArgument


class Element(NamedTuple):
    """What a format is: all else about it follows.

    Attributes:
        name: As `ml_dtypes` calls it.
        fraction_bits: How many bits of the significand are stored.
        least_exponent: That of the smallest normal number.
        largest: The largest finite value.
        beyond: What a finite value becomes that rounds to more than `largest`, if it does not saturate.
    """

    name: str
    fraction_bits: int
    least_exponent: int
    largest: float
    beyond: Literal["infinity", "nan", "largest"]

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest power of two: emax in the OCP specification."""
        return math.frexp(self.largest)[1] - 1


ELEMENTS = {
    element.name: element
    for element in (
        Element("float32", 23, -126, (2.0 - 2.0**-23) * 2.0**127, "infinity"),
        Element("float16", 10, -14, 65504.0, "infinity"),
        Element("bfloat16", 7, -126, (2.0 - 2.0**-7) * 2.0**127, "infinity"),
        # Micikevicius et al. 2022, FP8 Formats for Deep Learning (https://arxiv.org/abs/2209.05433), table 1.
        Element("float8_e4m3fn", 3, -6, 448.0, "nan"),
        Element("float8_e5m2", 2, -14, 57344.0, "infinity"),
        # OCP Microscaling Formats (MX) Specification 1.0, section 5.3: neither infinity nor NaN.
        Element("float6_e2m3fn", 3, 0, 7.5, "largest"),
        Element("float6_e3m2fn", 2, -2, 28.0, "largest"),
        Element("float4_e2m1fn", 1, 0, 6.0, "largest"),
    )
}
"""Every format by its name."""
_OF_TENSORFLOW = ("float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
_BITS = {tf.float16: np.int16, tf.bfloat16: np.int16, tf.float32: np.int32, tf.float64: np.int64}


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """The limits of a floating-point format under rounding to nearest, ties to even.

    Attributes:
        name: Such as "float16".
        max: The largest finite value.
        smallest_normal: The smallest positive value with full precision.
        smallest_subnormal: The smallest positive value.
        epsilon: The distance from 1 to the next larger value.
        overflow_threshold: Where rounding stops giving `max`. A magnitude above it becomes infinity, or NaN in a
            format without infinities; the threshold itself rounds to the even neighbour: infinity, but `max` in
            float8_e4m3fn.
        zero_threshold: The largest magnitude that rounds to zero: half of `smallest_subnormal`, a tie.
        has_infinity: False for float8_e4m3fn, where what is too large becomes NaN.

    The predicates compare bit patterns, so they are exact on hardware that flushes subnormals to zero. They take a
    float16, bfloat16, float32 or float64 tensor of any shape and return a bool tensor of that shape; infinities, NaN
    and zeros satisfy none of them.
    """

    name: str
    max: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    overflow_threshold: float
    zero_threshold: float
    has_infinity: bool

    @property
    def dtype(self) -> tf.DType:
        """The format as a TensorFlow dtype."""
        return tf.as_dtype(self.name)

    def overflows(self, x: tf.types.experimental.TensorLike) -> tf.Tensor:
        """Where a finite `x` would become infinity, or NaN in a format without infinities."""
        magnitude, dtype = _magnitude(x)
        first = _first_pattern(self.overflow_threshold, dtype, inclusive=self.has_infinity)
        infinity = _first_pattern(math.inf, dtype, inclusive=True)
        return tf.logical_and(magnitude >= first, magnitude < infinity)

    def underflows(self, x: tf.types.experimental.TensorLike) -> tf.Tensor:
        """Where a non-zero `x` would become zero."""
        magnitude, dtype = _magnitude(x)
        return tf.logical_and(magnitude > 0, magnitude < _first_pattern(self.zero_threshold, dtype, inclusive=False))

    def becomes_subnormal(self, x: tf.types.experimental.TensorLike) -> tf.Tensor:
        """Where `x` would become a non-zero subnormal number, which holds fewer bits."""
        magnitude, dtype = _magnitude(x)
        first = _first_pattern(self.zero_threshold, dtype, inclusive=False)
        # Half a step below the smallest normal is a tie, and the normal number is the even one.
        normal = _first_pattern(self.smallest_normal - self.smallest_subnormal / 2, dtype, inclusive=True)
        return tf.logical_and(magnitude >= first, magnitude < normal)


def float_format(dtype: str | tf.DType | np.dtype | type) -> FloatFormat:
    """Facts of a floating-point format.

    Args:
        dtype: "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2" or "float32", as a name, a `tf.DType` or a NumPy
            dtype.

    Raises:
        InvalidArgument: For any other format.
    """
    try:
        # TensorFlow also takes an integer, the number of a dtype in its protocol.
        name = dtype if isinstance(dtype, str) else "" if isinstance(dtype, int) else tf.as_dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in _OF_TENSORFLOW:
        raise InvalidArgument(f"float_format({dtype!r}): expected one of {', '.join(_OF_TENSORFLOW)}.")
    element = ELEMENTS[name]
    epsilon, smallest_normal = 2.0**-element.fraction_bits, 2.0**element.least_exponent
    return FloatFormat(
        name=name,
        max=element.largest,
        smallest_normal=smallest_normal,
        smallest_subnormal=smallest_normal * epsilon,
        epsilon=epsilon,
        overflow_threshold=element.largest + 2.0**element.largest_exponent * epsilon / 2,
        zero_threshold=smallest_normal * epsilon / 2,
        has_infinity=element.beyond == "infinity",
    )


def _magnitude(x: tf.types.experimental.TensorLike) -> tuple[tf.Tensor, tf.DType]:
    """The bits of |x| as integers, which are ordered as the magnitudes are, and the dtype of `x`."""
    x = tf.convert_to_tensor(x)
    if x.dtype not in _BITS:
        raise InvalidArgument(
            f"a tensor of dtype {x.dtype.name}: expected float16, bfloat16, float32 or float64; cast it first."
        )
    integer = _BITS[x.dtype]
    bits = tf.bitcast(x, tf.as_dtype(integer))
    return tf.bitwise.bitwise_and(bits, np.iinfo(integer).max), x.dtype


def _first_pattern(value: float, dtype: tf.DType, *, inclusive: bool) -> int:
    """The bits of the least magnitude in `dtype` that is at least `value`, or above it if not `inclusive`."""
    with np.errstate(over="ignore", under="ignore"):
        nearest = np.asarray(value, np.float64).astype(dtype.as_numpy_dtype)
    reached = float(nearest) >= value if inclusive else float(nearest) > value
    return int(nearest.view(_BITS[dtype])) + (not reached)
