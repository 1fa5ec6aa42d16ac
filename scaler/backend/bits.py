"""The bits of the magnitudes of floating-point numbers as integers: patterns up to `MAGNITUDE`.

TensorFlow keeps int32 arithmetic in the host's memory. On a GPU an operation on int32 tensors would copy each of them
to the host and back at every step. There are device kernels for uint32, but none for its maximum. A CPU computes in
int32, for which it has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler.backend.graphs import has_gpu

MAGNITUDE = 0x7FFFFFFF
"""All bits of a float32 but its sign."""


def kind() -> tf.DType:
    """What patterns are kept in: uint32 for a GPU, and int32 for a CPU."""
    return tf.uint32 if has_gpu() else tf.int32


def constant(pattern: int) -> tf.Tensor:
    """A pattern of bits, a scalar of `kind()`."""
    return tf.constant(pattern, kind())


def magnitude_bits(values: tf.Tensor) -> tf.Tensor:
    """The bits of |x| of float32 values, of `kind()`: ordered as the magnitudes are, with NaN above infinity."""
    return tf.bitwise.bitwise_and(tf.bitcast(values, kind()), constant(MAGNITUDE))


def spacing(values: tf.Tensor, fraction_bits: int, least_exponent: int) -> tf.Tensor:
    """The distance between a format's numbers around each value: a power of two, at least 2^-126.

    Args:
        values: Float32, of any shape.
        fraction_bits: Those that the format stores.
        least_exponent: Of its smallest normal number.

    Returns:
        Float32, of that shape.
    """
    exponent = tf.bitwise.right_shift(magnitude_bits(values), constant(23))
    # Biased by 127, as float32 keeps it. Of bfloat16's smallest numbers the spacing is subnormal, which kernels take
    # for 0.
    least = max(least_exponent + 127, fraction_bits + 1)
    biased = tf.maximum(exponent, constant(least)) - constant(fraction_bits)
    return as_float(tf.bitwise.left_shift(biased, constant(23)))


def largest(patterns: Sequence[tf.Tensor]) -> tf.Tensor:
    """The largest of all patterns in some tensors, a scalar for `as_float`; 0 of none."""
    if has_gpu():
        patterns = [tf.cast(one, tf.int64) for one in patterns]
    zero = tf.constant(0, tf.int64 if has_gpu() else tf.int32)
    # Of no values the maximum is the least integer.
    return tf.reduce_max(tf.stack([zero, *map(tf.reduce_max, patterns)]))


def as_float(patterns: tf.Tensor) -> tf.Tensor:
    """The float32 numbers of patterns of bits, of `kind()` or int64."""
    return tf.bitcast(tf.cast(patterns, kind()), tf.float32)
