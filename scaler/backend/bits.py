"""The bits of floating-point numbers as unsigned integers: TensorFlow keeps int32 arithmetic in the host's memory.

On a GPU an operation on int32 tensors would copy each of them to the host and back at every step. There are device
kernels for uint32, but none for its maximum.
"""

from __future__ import annotations

import tensorflow as tf

from scaler.backend.devices import has_gpu

MAGNITUDE = 0x7FFFFFFF
"""All bits of a float32 but its sign."""


def constant(pattern: int) -> tf.Tensor:
    """A pattern of bits, scalar uint32."""
    return tf.constant(pattern, tf.uint32)


def magnitude_bits(values: tf.Tensor) -> tf.Tensor:
    """The bits of |x| of float32 values, uint32, which are ordered as the magnitudes are, with NaN above infinity."""
    return tf.bitwise.bitwise_and(tf.bitcast(values, tf.uint32), constant(MAGNITUDE))


def largest(bits: tf.Tensor) -> tf.Tensor:
    """The largest of patterns up to `MAGNITUDE`, scalar int64; the least integer of the dtype if there is none."""
    if has_gpu():
        return tf.reduce_max(tf.cast(bits, tf.int64))
    return tf.cast(tf.reduce_max(tf.bitcast(bits, tf.int32)), tf.int64)


def as_float(pattern: tf.Tensor) -> tf.Tensor:
    """The float32 numbers of patterns of bits, int64 or uint32."""
    return tf.bitcast(tf.cast(pattern, tf.uint32), tf.float32)
