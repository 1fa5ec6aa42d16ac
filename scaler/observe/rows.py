"""What is measured of several tensors at once: one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from scaler.errors import InvalidArgument
from scaler.gradients.lists import Gradient
from scaler.observe.bins import BINS
from scaler.observe.due import if_due
from scaler.observe.exponents import counts_and_largest


class Measured(NamedTuple):
    """What was measured, in the order of the rows.

    Attributes:
        counts: Int64 [rows, 280], as `exponents` counts.
        amax: Float32 [rows], the largest magnitude: infinity if there is one, NaN if there is one, 0 without values.
    """

    counts: tf.Tensor
    amax: tf.Tensor


def measured(rows: Mapping[str, Sequence[Gradient]], when: tf.Tensor | None = None) -> Measured:
    """Counts and largest magnitudes.

    Args:
        rows: For each row the tensors that are counted together, of the kinds that `exponents` takes.
        when: Scalar bool, whether to measure; where it is false, all of it is 0. Always, if not given.

    Raises:
        InvalidArgument: For what is no such mapping, and for a tensor of another dtype.
    """
    if not isinstance(rows, Mapping) or not all(isinstance(row, (list, tuple)) for row in rows.values()):
        raise InvalidArgument(
            f"measured(rows of type {type(rows).__name__}): expected a dict with a list of tensors for each row, such "
            "as collection.rows()."
        )
    if not rows:
        return Measured(tf.zeros([0, BINS], tf.int64), tf.zeros([0]))
    return if_due(when, lambda: Measured(*counts_and_largest(list(rows.values()))))


def swallowed_share(weights: tf.Tensor, updates: tf.Tensor) -> tf.Tensor:
    """The share of the updates other than 0 for which w + dw == w in the dtype of w, scalar float32; 0 without any.

    Args:
        weights: Float16, bfloat16 or float32, of any shape.
        updates: Float32, of that shape.
    """
    wanted = tf.not_equal(updates, tf.zeros_like(updates))
    after = tf.saturate_cast(tf.cast(weights, tf.float32) + updates, weights.dtype)
    # Of bits: XLA may leave out a cast to 16 bits whose result is compared in float32.
    lost = tf.logical_and(wanted, tf.equal(_bits(after), _bits(weights)))
    count = tf.maximum(tf.math.count_nonzero(wanted), tf.constant(1, tf.int64))
    return tf.cast(tf.math.count_nonzero(lost), tf.float32) / tf.cast(count, tf.float32)


def _bits(values: tf.Tensor) -> tf.Tensor:
    pattern = tf.bitcast(values, tf.uint32 if values.dtype == tf.float32 else tf.uint16)
    negative_zero = tf.constant(1 << (8 * pattern.dtype.size - 1), pattern.dtype)
    return tf.where(tf.equal(pattern, negative_zero), tf.constant(0, pattern.dtype), pattern)
