"""Each tensor of a list reduced to a scalar, with few operations: each one takes time to trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf


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


def not_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """For each floating tensor whether some value is infinite or NaN: bool [len(tensors)]."""
    return tf.logical_not(tf.stack(reduced(tf.reduce_all, list(map(tf.math.is_finite, tensors)))))
