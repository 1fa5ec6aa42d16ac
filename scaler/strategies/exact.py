"""Powers and logarithms of 2 with the same bits in eager mode, in a graph and under XLA.

XLA joins a product and a sum to one operation with one rounding, and has its own logarithm. So what is stored is
float32, what is computed is float64, where the product of two float32 numbers is exact, and logarithms are rounded to
a grid far coarser than the libraries differ.
"""

from __future__ import annotations

import tensorflow as tf

from scaler.checks import within

GRID = 2.0**16
"""Logarithms are rounded to multiples of 1 / GRID: no float32 has its logarithm near the middle of two."""
_EXPONENT = 0x7F800000


def wide(value: float | tf.Tensor) -> tf.Tensor:
    """A float32 tensor, or a number rounded to float32, as float64."""
    return tf.cast(tf.cast(value, tf.float32), tf.float64)


def narrow(value: tf.Tensor) -> tf.Tensor:
    """Float64 as float32, with 0 for what some kernels would keep as a subnormal number and others flush."""
    return tf.cast(tf.where(tf.abs(value) < 2.0**-126, tf.zeros_like(value), value), tf.float32)


def log2(value: tf.Tensor) -> tf.Tensor:
    """The logarithm of positive finite float32 numbers, float64 on the grid; -inf of 0, and of what flushes to 0."""
    mantissa = tf.bitcast(tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(_bits(value), 0x7FFFFF), 0x3F800000), tf.float32)
    fraction = tf.math.log(tf.cast(mantissa, tf.float64)) * 1.4426950408889634
    whole = exponent(value)
    rounded = tf.round(fraction * GRID) / GRID + tf.cast(whole, tf.float64)
    return tf.where(whole < -126, tf.constant(-float("inf"), tf.float64), rounded)


def exponent(value: tf.Tensor) -> tf.Tensor:
    """floor(log2(value)) of non-negative float32 numbers, int64: -127 of 0 and of subnormals, 128 of infinity."""
    return tf.cast(tf.bitwise.right_shift(tf.bitwise.bitwise_and(_bits(value), _EXPONENT), 23), tf.int64) - 127


def power_of_two(exponents: tf.Tensor) -> tf.Tensor:
    """2^exponent of tensors of integers, float32; the exponent counts as the nearest in [-126, 127]."""
    biased = within(tf.cast(exponents, tf.int64), -126, 127) + 127
    return tf.bitcast(tf.bitwise.left_shift(tf.cast(biased, tf.uint32), 23), tf.float32)


def power_of_two_at_most(value: tf.Tensor) -> tf.Tensor:
    """The largest power of two at most `value`, float32; 0 of subnormals."""
    return tf.bitcast(tf.bitwise.bitwise_and(_bits(value), _EXPONENT), tf.float32)


def exp2(value: tf.Tensor) -> tf.Tensor:
    """2^value of float64 numbers, float32: a power of two for an integer, and rounded to nearest otherwise.

    The value counts as the nearest in [-126, 127].
    """
    value = tf.clip_by_value(value, tf.constant(-126.0, tf.float64), tf.constant(127.0, tf.float64))
    whole = tf.floor(value)
    fraction = tf.cast(tf.math.exp((value - whole) * 0.6931471805599453), tf.float32)
    return power_of_two(whole) * fraction


def _bits(value: tf.Tensor) -> tf.Tensor:
    """The bits of float32 numbers."""
    # Not int32, whose arithmetic a GPU leaves to the host.
    return tf.bitcast(tf.cast(value, tf.float32), tf.uint32)
