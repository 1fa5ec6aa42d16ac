"""Values rounded to a narrower format, in TensorFlow operations that every device and XLA compute alike.

Not casts there and back: XLA is allowed to leave out such a pair (xla_allow_excess_precision), and with it the
rounding.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from scaler.backend import bits
from scaler.backend.autograph import no_autograph
from scaler.backend.formats import ELEMENTS, Element
from scaler.checks import check_flag
from scaler.errors import InvalidArgument

_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_TAKEN = (tf.float16, tf.bfloat16, tf.float32)


@no_autograph
def rounded(
    values: tf.types.experimental.TensorLike,
    format: str,
    *,
    saturate: bool = False,
    seed: tf.Tensor | tuple[int, int] | None = None,
) -> tf.Tensor:
    """Each value as a narrower format holds it: rounded to nearest with ties to even, or at random.

    To nearest, the bits are those of a cast by `ml_dtypes`, subnormal numbers and -0.0 included. Only what is not
    finite differs, in formats that cannot hold it: it becomes NaN, so that a loss scaler sees it.

    At random a value between the neighbours a < x < b becomes the upper one with probability (x - a) / (b - a), to
    within 2^-24 (2^-16 in bfloat16), so that the mean is the value (Gupta et al. 2015,
    https://arxiv.org/abs/1502.02551).

    Args:
        values: Float16, bfloat16 or float32, of any shape.
        format: "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn" or
            "float4_e2m1fn".
        saturate: Whether a finite value that is too large becomes the largest one. Without it it becomes infinity, or
            NaN in float8_e4m3fn. The formats of 6 and 4 bits have neither, and always saturate.
        seed: Two integers, or an int32 or int64 tensor [2]: rounds at random. The same seed rounds the same way.

    Returns:
        A tensor of the dtype and shape of `values`. Gradients pass through it as they are.

    Raises:
        InvalidArgument: For another format or dtype.
    """
    known = [name for name in ELEMENTS if name != "float32"]
    if not isinstance(format, str) or format not in known:
        raise InvalidArgument(f"format {format!r}: expected one of {', '.join(known)}.")
    element = ELEMENTS[format]
    check_flag("saturate", saturate)
    values = tf.convert_to_tensor(values)
    if values.dtype not in _TAKEN:
        raise InvalidArgument(f"rounded(values): dtype {values.dtype.name}: expected float16, bfloat16 or float32.")

    @tf.custom_gradient
    def straight_through(values: tf.Tensor) -> tuple:
        wide = tf.cast(values, tf.float32)
        return tf.cast(round_float32(wide, element, saturate, seed), values.dtype), lambda upstream: upstream

    return straight_through(values)


def round_float32(
    values: tf.Tensor, element: Element, saturate: bool, seed: tf.Tensor | tuple[int, int] | None = None
) -> tf.Tensor:
    """The same of float32 values, without a gradient of its own."""
    magnitude = bits.magnitude_bits(values)
    sign = tf.bitwise.bitwise_xor(tf.bitcast(values, bits.kind()), magnitude)
    chances = None if seed is None else tf.random.stateless_uniform(tf.shape(values), seed)
    if element.least_exponent == -126:
        result = _cut(magnitude, 23 - element.fraction_bits, chances)
    else:
        result = _in_steps(bits.as_float(magnitude), element, chances)
    # Compared as patterns: comparisons of floats may take subnormal numbers for 0.
    largest = int(np.float32(element.largest).view(np.int32))
    beyond = {"infinity": _INFINITY, "nan": _NAN, "largest": largest}[element.beyond]
    limit, infinity = bits.constant(largest), bits.constant(_INFINITY)
    result = tf.where(result > limit, limit if saturate else bits.constant(beyond), result)
    held = magnitude if element.beyond == "infinity" else bits.constant(_NAN)
    result = tf.where(magnitude >= infinity, held, result)
    return tf.bitcast(tf.bitwise.bitwise_or(result, sign), tf.float32)


def _in_steps(magnitude: tf.Tensor, element: Element, chances: tf.Tensor | None) -> tf.Tensor:
    """Rounds to multiples of the distance between neighbours, a power of two: quotient and product are exact."""
    step = bits.spacing(magnitude, element.fraction_bits, element.least_exponent)
    quotient = magnitude / step
    if chances is None:
        whole = tf.round(quotient)
    else:
        below = tf.floor(quotient)
        whole = below + tf.cast(chances < quotient - below, tf.float32)
    return tf.bitcast(whole * step, bits.kind())


def _cut(magnitude: tf.Tensor, count: int, chances: tf.Tensor | None) -> tf.Tensor:
    """Rounds to float32's exponents with fewer bits: the lowest `count` of them go.

    Subnormal numbers included, which float32 arithmetic may take for 0.
    """
    if chances is None:
        odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(magnitude, bits.constant(count)), bits.constant(1))
        added = odd + bits.constant(2 ** (count - 1) - 1)
    else:
        added = tf.cast(tf.floor(chances * 2.0**count), bits.kind())
    return tf.bitwise.bitwise_and(magnitude + added, bits.constant(bits.MAGNITUDE - (2**count - 1)))


def seed_from(values: tf.Tensor, seed: int, role: int) -> tf.Tensor:
    """A seed that is another one for other values: int64 [2].

    Rounding at random needs other numbers at each step. Taken from the values themselves, they need no state that a
    checkpoint would have to hold, or that replicas would have to agree on.
    """
    pattern = tf.cast(tf.bitcast(tf.cast(values, tf.float32), tf.int32), tf.int64)
    return tf.stack([tf.constant(np.int64(seed * 4 + role)), tf.reduce_sum(pattern)])
