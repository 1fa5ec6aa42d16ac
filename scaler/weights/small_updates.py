"""Updating 16-bit weights without float32 masters: two ways to keep small updates, and a count of those lost.

Rounded to nearest, an update smaller than half the distance between two neighbours leaves a weight as it was, however
often it is repeated. Rounding at random keeps it on average; compensated (Kahan) summation keeps it in a second 16-bit
number. For bfloat16 either comes close to float32 weights (Zamirai et al. 2020, Revisiting BFloat16 Training,
https://arxiv.org/abs/2010.06192); neither widens the range of float16.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import tensorflow as tf

from scaler.backend import bits
from scaler.errors import InvalidArgument

_SIGNIFICAND = {tf.bfloat16: 7, tf.float16: 10}
_LARGEST = {tf.bfloat16: float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), tf.float16: float(np.finfo(np.float16).max)}
_LEAST_EXPONENT = {tf.bfloat16: -126, tf.float16: -14}


def round_stochastically(values: tf.Tensor, dtype: str | tf.DType | np.dtype | type, seed: tf.Tensor) -> tf.Tensor:
    """Rounds each value at random to one of its two neighbours in a 16-bit dtype, so that the mean is the value.

    A value between the neighbours a < x < b becomes b with probability (x - a) / (b - a), to within 2^-24, and one that
    the dtype holds stays as it is. A finite value beyond the largest one of the dtype becomes that; infinities and NaN
    stay. Below 2^-119, where bfloat16's numbers lie closer than 2^-126, the neighbours are multiples of 2^-126.

    Args:
        values: Float32, of any shape.
        dtype: "bfloat16" or "float16", as a name, a `tf.DType` or a NumPy dtype.
        seed: Int32 [2]. The same seed rounds the same way; take another one at each step.

    Returns:
        A tensor of that dtype and shape.

    Raises:
        InvalidArgument: For another dtype.
    """
    dtype, values = _sixteen_bits(dtype), tf.convert_to_tensor(values, tf.float32)
    step = spacing(values, dtype)
    # Quotients by a power of two and sums below 2^24 are exact: nothing is rounded but by the floor.
    quotient = values / step
    below = tf.floor(quotient)
    chance = tf.random.stateless_uniform(tf.shape(values), seed)
    rounded = (below + tf.cast(chance < quotient - below, tf.float32)) * step
    return tf.cast(tf.where(tf.math.is_finite(values), _saturated(rounded, dtype), values), dtype)


def add_compensated(weights: tf.Tensor, compensation: tf.Tensor, update: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Weights plus an update, and what rounding has taken from them so far (Kahan).

        y = update - compensation
        new = round(weights + y)
        compensation = round((new - weights) - y)

    Args:
        weights: Bfloat16 or float16, of any shape.
        compensation: The same, zeros before the first update.
        update: Float32, what is to be added.

    Returns:
        The new weights and the new compensation, of the weights' dtype. A weight that is pushed beyond the dtype's
        largest value stays there.

    Raises:
        InvalidArgument: For another dtype.
    """
    dtype = _sixteen_bits(weights.dtype)
    old = tf.cast(weights, tf.float32)
    wanted = tf.cast(update, tf.float32) - tf.cast(compensation, tf.float32)
    new = _nearest(old + wanted, dtype)
    return tf.cast(new, dtype), tf.cast(_nearest((new - old) - wanted, dtype), dtype)


def swallowed_share(before: tf.Tensor, update: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    """The share of non-zero updates that did not change their weight, scalar float32; 0 if there are no updates.

    Args:
        before: Weights before the update, of any dtype and shape.
        update: What was to be added, of that shape.
        after: The weights after it.
    """
    wanted = tf.not_equal(update, tf.zeros_like(update))
    lost = tf.logical_and(wanted, tf.equal(before, after))
    count = tf.maximum(tf.math.count_nonzero(wanted), tf.constant(1, tf.int64))
    return tf.cast(tf.math.count_nonzero(lost), tf.float32) / tf.cast(count, tf.float32)


def _nearest(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Float32 values rounded to nearest, ties to even, in the dtype, and still as float32.

    Not a cast there and back: XLA is allowed to leave out such a pair (xla_allow_excess_precision), and with it the
    rounding.
    """
    step = spacing(values, dtype)
    rounded = tf.round(values / step) * step
    return tf.where(tf.math.is_finite(values), _saturated(rounded, dtype), values)


def _saturated(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.clip_by_value(values, -_LARGEST[dtype], _LARGEST[dtype])


def spacing(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The distance between the dtype's numbers around each value: a power of two, at least 2^-126.

    Args:
        values: Float32, of any shape.
        dtype: `tf.bfloat16` or `tf.float16`.

    Returns:
        Float32, of that shape.
    """
    return bits.spacing(values, _SIGNIFICAND[dtype], _LEAST_EXPONENT[dtype])


def _sixteen_bits(dtype: str | tf.DType | np.dtype | type) -> tf.DType:
    try:
        known = tf.as_dtype(dtype)
    except TypeError:
        known = None
    if known not in _SIGNIFICAND:
        raise InvalidArgument(f"dtype {dtype!r}: expected bfloat16 or float16.")
    return known
