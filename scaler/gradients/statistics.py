"""What a strategy may want to know about a step's gradients: pure functions.

An entry of a list of gradients is a tensor, a `tf.IndexedSlices` or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from scaler.gradients.lists import Gradient, values_of
from scaler.strategies.base import check_edges

_INFINITY = 0x7F800000


class Statistics(NamedTuple):
    """What was measured, in the order of the fields of `Event` after `finite`; None for what nobody needs.

    Attributes:
        amax: Scalar float32, as in `Event`.
        histogram: Int64 [edges + 1], as in `Event`.
    """

    amax: tf.Tensor | None = None
    histogram: tf.Tensor | None = None


def amax(grads: Sequence[Gradient]) -> tf.Tensor:
    """The largest magnitude, scalar float32: infinity if any value is not finite, 0 if there is none.

    Args:
        grads: Gradients of any floating dtype and shape; `tf.IndexedSlices` without duplicate indices, as
            `LossScaler.unscale` returns them.
    """
    # Bit patterns are ordered as magnitudes are, with every NaN above infinity; a maximum of floats may lose a NaN.
    largest = [tf.constant(0), *(tf.reduce_max(bits) for bits in map(_bits, _present(grads)))]
    return tf.bitcast(tf.minimum(tf.reduce_max(tf.stack(largest)), _INFINITY), tf.float32)


def histogram(grads: Sequence[Gradient], edges: Sequence[float]) -> tf.Tensor:
    """How many values lie in each interval of magnitude, int64 [edges + 1].

    The intervals are [0, e1], (e1, e2], ..., (en, infinity], and what is not finite counts in the last.

    Args:
        grads: *Scaled* gradients in the compute dtype, of any shape. Duplicate indices of a `tf.IndexedSlices` count
            one by one.
        edges: Positive finite numbers in ascending order, at least one; they are rounded to float32.

    Raises:
        InvalidArgument: For other edges.
    """
    check_edges(edges)
    bounds = tf.bitcast(tf.constant(edges, tf.float32), tf.int32)
    zero = tf.zeros([len(edges)], tf.int64)
    above = [zero]
    for bits in map(_bits, _present(grads)):
        counts = [tf.math.count_nonzero(bits > bound) for bound in tf.unstack(bounds)]
        above.append(tf.stack(counts) if counts else zero)
    total = tf.add_n([tf.zeros([1], tf.int64), *(tf.size(bits, tf.int64)[None] for bits in _present(grads))])
    reached = tf.concat([total, tf.add_n(above), [0]], axis=0)
    return reached[:-1] - reached[1:]


def _present(grads: Sequence[Gradient]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(values_of(grad)) for grad in grads if grad is not None]


def _bits(values: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_and(tf.bitcast(tf.cast(values, tf.float32), tf.int32), 0x7FFFFFFF)
