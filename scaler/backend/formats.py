"""The limits of each floating-point format, and what a cast to it does to a tensor."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import tensorflow as tf

from scaler.errors import InvalidArgument

_FORMATS = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
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
    if name not in _FORMATS:
        raise InvalidArgument(f"float_format({dtype!r}): expected one of {', '.join(_FORMATS)}.")
    info = ml_dtypes.finfo(_FORMATS[name])
    largest, epsilon, subnormal = float(info.max), float(info.eps), float(info.smallest_subnormal)
    last_step = 2.0 ** math.floor(math.log2(largest)) * epsilon
    return FloatFormat(
        name=name,
        max=largest,
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=subnormal,
        epsilon=epsilon,
        overflow_threshold=largest + last_step / 2,
        zero_threshold=subnormal / 2,
        has_infinity=name != "float8_e4m3fn",
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
