"""Each tensor of a list reduced to a scalar, with few operations: each one takes time to trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler.backend.devices import has_gpu
from scaler.backend.graphs import in_xla

_COLUMNS = 128
"""Sums that XLA adds up side by side."""
_WORTH_COLUMNS = 2**12
"""Elements of a tensor. Below, the second sum takes as long as the first saves."""


def reduced(reduce: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """`reduce`, such as `tf.reduce_sum`, over all axes of each tensor.

    Tensors of one rank share the constant that names their axes, of which TensorFlow makes one for each call.
    """
    axes: dict[int, tf.Tensor] = {}

    def one(tensor: tf.Tensor) -> tf.Tensor:
        rank = tensor.shape.rank
        if rank is None:
            return reduce(tensor)
        if rank not in axes:
            axes[rank] = tf.constant(list(range(rank)), tf.int32)
        return reduce(tensor, axis=axes[rank])

    return [one(tensor) for tensor in tensors]


def sums_of_squares(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sum of the squares of each float32 tensor, scalars.

    XLA adds the values of a tensor one after another on a CPU, as it was told. Columns it adds side by side, two to
    three times as fast.
    """
    squares = list(map(tf.square, tensors))
    if in_xla() and not has_gpu():
        squares = list(map(_sums_of_columns, squares))
    return reduced(tf.reduce_sum, squares)


def _sums_of_columns(squares: tf.Tensor) -> tf.Tensor:
    size = squares.shape.num_elements()
    if size is None or size < _WORTH_COLUMNS or size % _COLUMNS:
        return squares
    # No sum is negative. Without `abs` XLA would join both sums into one over all values.
    return tf.abs(tf.reduce_sum(tf.reshape(squares, [-1, _COLUMNS]), 0))


def not_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """For each floating tensor whether some value is infinite or NaN: bool [len(tensors)]."""
    return tf.logical_not(tf.stack(reduced(tf.reduce_all, list(map(tf.math.is_finite, tensors)))))
